"""The demo: it decodes, its seed decides the text, it sees a difference, its model is pocketsphinx's."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import pytest

from specverify_dpex import cli, demo, reference

CONTEXTS = [
    "",
    "<s>",
    "<s> i",
    "<s> zyuganov's",
    "the",
    "of the",
    "new york",
    "the the",
    "york zurich",
    "</s>",
]


@pytest.fixture(scope="module")
def pocketsphinx() -> Any:
    if os.environ.get("CI") or os.environ.get("SPECVERIFY_DPEX_REQUIRE_DEVICE"):
        import pocketsphinx

        return pocketsphinx
    return pytest.importorskip("pocketsphinx", reason="needs the model: pip install 'specverify-dpex[demo]'")


@pytest.fixture(scope="module")
def model(pocketsphinx: Any) -> demo.Trigrams:
    return demo.Trigrams(pocketsphinx.get_model_path("en-us/en-us.lm.bin"))


@pytest.fixture
def decode(
    model: demo.Trigrams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs the demo with a model that is loaded once; returns its exit code and what it prints."""
    monkeypatch.setattr(demo, "Trigrams", lambda path: model)

    def run(*options: str) -> tuple[int, str]:
        code = cli.main(["demo", "--batch", "2", "--steps", "4", *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    yield run


def text_of(output: str) -> str:
    """What is printed before the times."""
    return output[: output.index("\ntime ")]


def test_demo_decodes_every_sequence(decode, device):
    code, output = decode("--device", device.filter_string)
    assert code == 0
    assert device.name.strip() in output
    assert "72,547 words" in output
    assert "Each of the 4 steps equalled the reference, bit for bit." in output
    text = output[output.index("  0 ") : output.index("accepted   ")]
    assert len(re.findall(r"\[[^]]+\]", text)) == 2 * 4  # verify draws a word for each sequence and step
    assert "\033" not in output
    histogram = re.findall(r"^ {7}([0-5]) +([0-9]+) ", output, re.MULTILINE)
    assert [length for length, _ in histogram] == list("012345")
    assert sum(int(times) for _, times in histogram) == 2 * 4


@pytest.mark.usefixtures("device")
def test_demo_mean_is_of_the_histogram(decode):
    _, output = decode()
    histogram = re.findall(r"^ {7}([0-5]) +([0-9]+) ", output, re.MULTILINE)
    words = 1 + sum(int(length) * int(times) for length, times in histogram) / (2 * 4)
    assert f"{words:.2f} words a step and sequence, of at most 6." in output
    text = output[output.index("  0 ") : output.index("accepted   ")].replace(".", " .").replace("[ .]", " .")
    assert len(re.sub(r"^  [01 ]", "", text, flags=re.MULTILINE).split()) == round(words * 2 * 4)


@pytest.mark.usefixtures("device")
def test_demo_text_follows_from_the_seed(decode):
    texts = [text_of(decode("--seed", seed)[1]) for seed in ("7", "7", "8")]
    assert texts[0] == texts[1]
    assert texts[0].replace("seed 7", "seed 8") != texts[2]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("options", [("--draft", "unigram"), ("--drafts", "0"), ("--drafts", "1", "--batch", "1")])
def test_demo_options_decode(decode, options):
    code, output = decode(*options)
    assert code == 0
    assert "equalled the reference" in output


@pytest.mark.usefixtures("device")
def test_demo_prompt_begins_every_sequence(decode):
    code, output = decode("--prompt", "I would like to")
    assert code == 0
    assert "\n  0 i would like to " in output
    assert "\n  1 i would like to " in output


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("field", ["accepted", "next_token"])
def test_demo_difference_fails(decode, monkeypatch, field):
    verify = reference.verify

    def wrong(*arrays: Any, offset: int, **options: Any) -> Any:
        result = verify(*arrays, offset=offset, **options)
        if offset == 2:
            getattr(result, field)[1] += 1
        return result

    monkeypatch.setattr(reference, "verify", wrong)
    code, output = decode("--seed", "5")
    assert code == 1
    assert "Step 2 differs from the reference (seed 5, offset 2):\n  sequence   1, drafts [" in output
    got, want = re.findall(r"accepted (\d+), next_token (\d+)", output)
    difference = {"accepted": int(want[0]) - int(got[0]), "next_token": int(want[1]) - int(got[1])}
    assert difference == {"accepted": 0, "next_token": 0, field: 1}
    assert "equalled" not in output


@pytest.mark.parametrize("package", ["pocketsphinx", "tqdm"])
def test_demo_missing_package_is_one_line(package, monkeypatch, capsys):
    for name in ("pocketsphinx", "tqdm"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setattr(sys.modules["pocketsphinx"], "get_model_path", None, raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # import of it raises ModuleNotFoundError
    assert cli.main(["demo"]) == 2
    message = f"specverify-dpex demo: {package} is missing: pip install 'specverify-dpex[demo]'\n"
    assert capsys.readouterr() == ("", message)


@pytest.mark.usefixtures("pocketsphinx")
def test_demo_missing_device_is_one_line(capsys):
    assert cli.main(["demo", "--device", "opencl:cpu:99"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(r"specverify-dpex demo: no SYCL device 'opencl:cpu:99' \(found: .*\)\. Run `.*\n", err)


@pytest.mark.usefixtures("device")
def test_demo_unknown_prompt_is_one_line(decode):
    message = "specverify-dpex demo: the model does not know the word 'xyzzy' of the prompt\n"
    assert decode("--prompt", "say xyzzy") == (2, message)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch", "0", "expected an integer in [1, "),
        ("--drafts", "-1", "expected an integer in [0, "),
        ("--steps", "0", "expected an integer in [1, "),
        ("--seed", str(2**64), f"expected an integer in [0, {2**64 - 1}], got {2**64}"),
        ("--steps", "many", "invalid integer value: 'many'"),
        ("--draft", "trigram", "invalid choice: 'trigram'"),
    ],
)
def test_demo_option_out_of_range(option, value, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", f"{option}={value}"])
    assert message in capsys.readouterr().err


def test_text_colours_tell_origins_apart(model):
    word = model.tokens("yes")[0]
    (end,) = (token for token, text in enumerate(model.words) if text == model.END)
    sequence = [demo.Token(word, "prompt"), demo.Token(word, "draft"), demo.Token(end, "target")]
    assert demo._text(model, [sequence], colour=False).endswith("\n\n  0 yes yes[.]\n")
    coloured = "\n\n  0 \033[2myes\033[0m \033[32myes\033[0m\033[1;33m.\033[0m\n"
    assert demo._text(model, [sequence], colour=True).endswith(coloured)


@pytest.mark.parametrize("text", CONTEXTS, ids=lambda text: text.replace(" ", "-") or "none")
def test_model_row_is_that_of_pocketsphinx(model, pocketsphinx, text):
    logmath = pocketsphinx.LogMath()
    ngrams = pocketsphinx.NGramModel(pocketsphinx.Config(), logmath, pocketsphinx.get_model_path("en-us/en-us.lm.bin"))
    newest_first = text.split()[::-1]
    logarithms = [ngrams.prob([word, *newest_first]) for word in model.words]  # to the integer below
    expected = np.exp(np.array(logarithms) * logmath.log_to_ln(1))
    row = model.row(tuple(model.tokens(text)))
    assert row.dtype == np.float32
    assert abs(expected.sum() - 1) < 1e-3
    np.testing.assert_allclose(row, expected / expected.sum(), rtol=1e-4, atol=1e-40)


def test_model_rows_sum_to_one(model):
    rng = np.random.default_rng(1)
    contexts = [tuple(model.tokens(text)) for text in CONTEXTS] + rng.integers(0, 72547, (200, 2)).tolist()
    for context in contexts:
        row = model.row(tuple(context))
        assert row.min() >= 0
        assert abs(float(row.sum(dtype=np.float64)) - 1) < 1e-4


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ("", "<s>"),
        ("so", "<s> so"),
        ("so it", "so it"),
        ("so it is", "it is"),
        ("so </s>", "<s>"),
        ("</s> so", "<s> so"),
        ("<s>", "<s> <s>"),
    ],
)
def test_model_context_begins_with_the_sentence(model, text, context):
    assert model.context(model.tokens(text)[-2:]) == tuple(model.tokens(context))


def test_model_other_format_is_refused(tmp_path):
    path = tmp_path / "en-us.lm.bin"
    path.write_bytes(b"Trie Language Model\x04" + bytes(100))
    with pytest.raises(RuntimeError, match=r"en-us\.lm\.bin is not a model of pocketsphinx 5: pip install"):
        demo.Trigrams(str(path))


def test_propose_draws_the_drafts_from_their_rows(model):
    start = (model.tokens("<s>")[0],)
    tokens, draft, target = demo._propose(model, [start] * 100, 2, 1, np.random.default_rng(3))
    assert draft.shape == (100, 2, 72547) and target.shape == (100, 3, 72547)
    for sequence in range(0, 100, 20):
        first, second = tokens[sequence].tolist()
        contexts = [start, model.context((*start, first)), model.context((first, second))]
        np.testing.assert_array_equal(target[sequence], [model.row(context) for context in contexts])
        np.testing.assert_array_equal(draft[sequence], [model.row(context[-1:]) for context in contexts[:2]])
    # The drawn words' share of the row where they are likely: 100 draws, four standard errors.
    likely = np.argsort(model.row(start))[-100:]
    share = float(model.row(start)[likely].sum())
    drawn = np.isin(tokens[:, 0], likely).mean()
    assert abs(drawn - share) < 4 * (share * (1 - share) / 100) ** 0.5

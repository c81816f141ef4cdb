"""Exact verification of speculative decoding on Intel GPUs."""

from specverify_dpex import runtime

runtime.prepare()  # before dpctl loads: it makes the SYCL runtime and its devices findable

__all__ = ["AcceptanceStats", "Counts", "UsmArray", "VerifyResult", "emitted_tokens", "prepare", "uniforms", "verify"]
__version__ = "0.1.0"

try:
    import dpctl as _dpctl  # noqa: F401
except ImportError as error:
    _reason = str(error)  # the package still imports, so that its doctor can say what to do

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ImportError(f"dpctl cannot be imported: {_reason}. Run `specverify-dpex doctor` for what to do")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

else:
    from specverify_dpex.emitted import emitted_tokens
    from specverify_dpex.philox import uniforms
    from specverify_dpex.result import VerifyResult
    from specverify_dpex.stats import AcceptanceStats, Counts
    from specverify_dpex.usm_array import UsmArray
    from specverify_dpex.verify import prepare, verify

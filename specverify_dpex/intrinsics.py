"""The SPIR-V built-ins that numba-dpex lacks, as functions that a kernel can call.

Each is one call of an OpenCL or SPIR-V built-in by its mangled name, which llvm-spirv turns into one instruction.
numba-dpex has its own way to read a work-item's ids, a partial load of the built-in vector, on which the graphics
compiler of Debian 12 crashes; the OpenCL built-ins work on every compiler tried.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba_dpex.kernel_api_impl.spirv.target import CC_SPIR_FUNC, SPIRV_TARGET_NAME

_DEVICE_SCOPE, _WORK_GROUP_SCOPE = 1, 2  # SPIR-V specification, "Scope <id>"
_ACQUIRE_RELEASE, _CROSS_WORK_GROUP_MEMORY = 0x8, 0x200  # "Memory Semantics <id>"
_REDUCE, _EXCLUSIVE_SCAN = 0, 2  # "Group Operation": 0 Reduce, 1 InclusiveScan, 2 ExclusiveScan

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()


def _call(builder, name, result, arguments, convergent=False):
    """Call the spir_func `name`, declaring it in the module where it is not yet."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    function.calling_convention = CC_SPIR_FUNC
    call = builder.call(function, arguments, cconv=CC_SPIR_FUNC)
    # A convergent call must not be moved into control flow that only some work-items take.
    attributes = ("nounwind", "convergent") if convergent else ("nounwind",)
    for attribute in attributes:
        function.attributes.add(attribute)
        call.attributes.add(attribute)
    return call


def _work_item_query(name):
    """A query of one OpenCL work-item function, along the dimension that is its one argument."""

    def query(typing_context, dimension):
        def generate(context, builder, signature, arguments):
            return _call(builder, name, _I64, [builder.trunc(arguments[0], _I32)])

        return types.int64(types.int64), generate

    return query


def _group_collective(name, operation):
    """A collective of a work-group over one uint32 of each work-item; all work-items must call it."""

    def collective(typing_context, value):
        def generate(context, builder, signature, arguments):
            scope = ir.Constant(_I32, _WORK_GROUP_SCOPE)
            return _call(builder, name, _I32, [scope, ir.Constant(_I32, operation), *arguments], convergent=True)

        return types.uint32(types.uint32), generate

    return collective


def _atomic_increment(typing_context, pointer):
    """Add 1 to the first uint32 at a pointer and return what it was, ordering the device's memory around it.

    Work-items that see the sum of others' increments see all that those wrote before.
    """

    def generate(context, builder, signature, arguments):
        scope = ir.Constant(_I32, _DEVICE_SCOPE)
        semantics = ir.Constant(_I32, _ACQUIRE_RELEASE | _CROSS_WORK_GROUP_MEMORY)
        word = builder.bitcast(arguments[0], _I32.as_pointer(pointer.addrspace))
        name = f"_Z18__spirv_AtomicIAddPU3AS{pointer.addrspace}jjjj"
        return _call(builder, name, _I32, [word, scope, semantics, ir.Constant(_I32, 1)], convergent=True)

    return types.uint32(pointer), generate


def _group_barrier(typing_context):
    """Wait for the work-group, with what its work-items wrote to global memory visible to all of it."""

    def generate(context, builder, signature, arguments):
        scope = ir.Constant(_I32, _WORK_GROUP_SCOPE)
        semantics = ir.Constant(_I32, _ACQUIRE_RELEASE | _CROSS_WORK_GROUP_MEMORY)
        name = "_Z22__spirv_ControlBarrierjjj"
        _call(builder, name, ir.VoidType(), [scope, scope, semantics], convergent=True)
        return context.get_dummy_value()

    return types.void(), generate


def _at(typing_context, pointer, elements):
    """The pointer `elements` past `pointer`, which numba's pointers have no operator for."""

    def generate(context, builder, signature, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return pointer(pointer, types.int64), generate


def _as_int32(typing_context, pointer):
    """The same address as a pointer to int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32, addrspace=pointer.addrspace)(pointer), generate


def _load(typing_context, pointer, index):
    """An element of a row of probabilities as float32, by the pointer's type.

    numba has no 16-bit floats, so pointers to them go by integers of that size: int16 is float16, uint16 is bfloat16.
    """

    def generate(context, builder, signature, arguments):
        row, element = arguments
        if pointer.dtype is types.float32:
            return builder.load(builder.gep(row, [element]))
        if pointer.dtype is types.int16:  # the built-in that every device has, with or without float16 arithmetic
            half = ir.HalfType().as_pointer(pointer.addrspace)
            name = f"_Z10vload_halfmPU3AS{pointer.addrspace}KDh"
            return _call(builder, name, _F32, [element, builder.bitcast(row, half)])
        high_bits = builder.zext(builder.load(builder.gep(row, [element])), _I32)
        return builder.bitcast(builder.shl(high_bits, ir.Constant(_I32, 16)), _F32)

    return types.float32(pointer, types.int64), generate


def _bits_of(typing_context, value):
    """The bits of a float32 as a uint32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), generate


def _fma(typing_context, a, b, c):
    def generate(context, builder, signature, arguments):
        return _call(builder, "_Z15__spirv_ocl_fmafff", _F32, arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


_device = intrinsic(target=SPIRV_TARGET_NAME)

local_id = _device(_work_item_query("_Z12get_local_idj"))
local_size = _device(_work_item_query("_Z14get_local_sizej"))
group_id = _device(_work_item_query("_Z12get_group_idj"))
num_groups = _device(_work_item_query("_Z14get_num_groupsj"))
group_sum = _device(_group_collective("_Z17__spirv_GroupIAddjjj", _REDUCE))
group_scan = _device(_group_collective("_Z17__spirv_GroupIAddjjj", _EXCLUSIVE_SCAN))
group_min = _device(_group_collective("_Z17__spirv_GroupUMinjjj", _REDUCE))
group_max = _device(_group_collective("_Z17__spirv_GroupUMaxjjj", _REDUCE))
fma = _device(_fma)
at = _device(_at)
as_int32 = _device(_as_int32)
load = _device(_load)
bits_of = _device(_bits_of)
atomic_increment = _device(_atomic_increment)
group_barrier = _device(_group_barrier)

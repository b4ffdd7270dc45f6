"""Products of groups of rows, each group with a matrix of its own: the experts of a mixture.

XLA has no fast form of them for GPUs. There, a kernel takes the place of a loop over blocks of rows
if the inputs allow it and it passed the check of this GPU (`pallas_kernels.self_check`).
"""

from types import ModuleType

from pallas_kernels import nvidia
from pallas_kernels.dispatch import Backend, self_check

TRITON = Backend("pallas_kernels.backends.triton.grouped", ("cuda",), needs_check=True)


def gpu_kernels(x, w, block: int) -> ModuleType | None:
    """Returns the module with `products` and `sums` for the GPU that a program is traced for.

    Args:
      x: rows [R, I], or those of the result; R is a multiple of `block`.
      w: matrices [E, I, O].
      block: rows that have the same matrix.

    Returns:
      The module, or None if it cannot run the inputs or may not.
    """
    if nvidia.architecture() is None:
        return None
    module, check = TRITON.load(), self_check()
    if module.unsupported(x, w, block) is not None:
        return None
    return module if check.why_refused("triton", str(x.dtype), check.GROUPED) is None else None

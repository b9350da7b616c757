"""Triton and its language, for the `…_triton` modules alone: importing this loads Triton.

Where it is not installed nobody calls a kernel (see `kernels`), but the files may still be read: each kernel is then a
plain function.
"""

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    from types import SimpleNamespace

    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda kernel: kernel))
    tl = SimpleNamespace(constexpr=lambda value: value)

__all__ = ["tl", "triton"]

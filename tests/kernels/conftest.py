import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _correct_bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter stores bfloat16 as whole numbers and multiplies these (seen in 3.6 to 3.9)."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot

    def in_float32(factor: TensorHandle) -> TensorHandle:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: InterpreterBuilder, one: TensorHandle, other: TensorHandle, *others: object) -> TensorHandle:
        return product(self, in_float32(one), in_float32(other), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

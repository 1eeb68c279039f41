"""Weights of linear layers in the layout that the CPU multiplies fastest.

Decoding multiplies a handful of rows with every weight of the model. PyTorch's usual product is made
for many rows; oneDNN's, on weights that were packed beforehand, reads them at nearly the memory's
speed. For 8 rows in float32, [576 -> 49152] took 16 ms as `nn.Linear` and 4.9 ms packed, and
[576 -> 1536] 0.34 and 0.16 ms (two cores, AVX-512); with 512 rows packed was still the faster one.
"""

import torch
from torch import nn

PACKED_FOR_ROWS = 32
"""oneDNN chooses the layout by a number of rows. This choice was never slower than others from 1 to 512."""


class PackedLinear(nn.Module):  # type: ignore[misc]  # torch is not followed by mypy
    """Computes what the given `nn.Linear` does, up to rounding.

    The two operators are those that PyTorch's own compiler puts in the place of a frozen linear
    layer; they have no public name.
    """

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.in_features = dense.in_features
        self.out_features = dense.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(dense.weight.detach(), PACKED_FOR_ROWS)
        self.bias = None if dense.bias is None else dense.bias.detach()

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weight [out, in], for the few models that compute with it on their own."""
        return self._packed.to_dense()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return torch.ops.mkldnn._linear_pointwise.default(rows, self._packed, self.bias, "none", [], "")


def can_pack(model: nn.Module) -> bool:
    """Whether `pack` does something for this model: float32 weights on a CPU whose PyTorch has oneDNN."""
    weight = next(model.parameters())
    dense_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return dense_on_cpu and bool(torch.backends.mkldnn.is_available())


def pack(model: nn.Module) -> None:
    """Replace the model's linear layers in place, one at a time, so that no two copies of all are held.

    The other weights are copied too: a view into the weights' file would keep all of it mapped.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    for weight in model.parameters():
        weight.data = weight.data.clone()

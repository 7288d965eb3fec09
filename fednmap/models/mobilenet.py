"""MobileNetV3-Small: Howard et al., Searching for MobileNetV3, ICCV 2019."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import conv2d

from fednmap.names import choose

Norm = Callable[[int], nn.Module]

NORMS: dict[str, Norm] = {
    "batch": lambda channels: nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01),
    "group": lambda channels: nn.GroupNorm(8, channels),  # 8 divides every width of the table
}

# Table 2 of the paper: kernel, expanded width, output width, squeeze-and-excite, nonlinearity, stride.
ROWS: tuple[tuple[int, int, int, bool, type[nn.Module], int], ...] = (
    (3, 16, 16, True, nn.ReLU, 2),
    (3, 72, 24, False, nn.ReLU, 2),
    (3, 88, 24, False, nn.ReLU, 1),
    (5, 96, 40, True, nn.Hardswish, 2),
    (5, 240, 40, True, nn.Hardswish, 1),
    (5, 240, 40, True, nn.Hardswish, 1),
    (5, 120, 48, True, nn.Hardswish, 1),
    (5, 144, 48, True, nn.Hardswish, 1),
    (5, 288, 96, True, nn.Hardswish, 2),
    (5, 576, 96, True, nn.Hardswish, 1),
    (5, 576, 96, True, nn.Hardswish, 1),
)


class MobileNetV3Small(nn.Module):
    """Convolution, eleven inverted residual blocks, convolution, mean over the picture, two linear layers."""

    def __init__(self, num_classes: int, norm: Norm, channels: int) -> None:
        super().__init__()
        first, last, wide = 16, 576, 1024
        layers: list[nn.Module] = [_convolution(channels, first, 3, norm, nn.Hardswish, stride=2)]
        width = first
        for kernel, expanded, out, squeeze, activation, stride in ROWS:
            residual = stride == 1 and width == out
            parts: list[nn.Module] = [_convolution(width, expanded, 1, norm, activation)] if expanded != width else []
            parts.append(nn.Sequential(Depthwise(expanded, kernel, stride), norm(expanded), activation()))
            parts += [SqueezeExcite(expanded)] if squeeze else []
            layers.append(Block(nn.Sequential(*parts, _convolution(expanded, out, 1, norm, None)), residual))
            width = out
        layers.append(_convolution(width, last, 1, norm, nn.Hardswish))
        self.features = nn.Sequential(*layers)
        # The third place is the dropout of the paper: it trains on far more data, and a gradient that is a
        # function of (client, round, step) alone leaves no room for it.
        self.classifier = nn.Sequential(
            nn.Linear(last, wide), nn.Hardswish(), nn.Identity(), nn.Linear(wide, num_classes)
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)
            if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((-2, -1)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Widen, filter each channel on its own, reweigh the channels, narrow; add the input where shapes agree."""

    def __init__(self, block: nn.Sequential, residual: bool) -> None:
        super().__init__()
        self.block, self.residual = block, residual

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return x + y if self.residual else y


class Depthwise(nn.Conv2d):
    """Each channel filtered on its own, with an odd kernel and as much padding as it reaches over the border.

    What of the kernel meets padding alone, wherever it stands, is left out: of 5 x 5 weights a picture of 2 x 2 meets
    3 x 3, and of 1 x 1 the one in the middle. Values and gradients are the same, in a fraction of the time.
    """

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        super().__init__(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        reach = self.kernel_size[0] // 2
        rows, columns = (min(reach, side - 1) for side in x.shape[-2:])
        met = self.weight[..., reach - rows : reach + rows + 1, reach - columns : reach + columns + 1]
        if tuple(x.shape[-2:]) == (1, 1):
            return x * met.view(-1, 1, 1)
        return conv2d(x, met, None, self.stride, (rows, columns), groups=self.groups)


class SqueezeExcite(nn.Module):
    """Each channel times a number in [0, 1] that a small network finds from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = max(8, (channels // 4 + 4) // 8 * 8)  # a quarter, to the nearest multiple of 8
        self.fc1, self.fc2 = nn.Conv2d(channels, narrow, 1), nn.Conv2d(narrow, channels, 1)
        self.inner, self.outer = nn.ReLU(), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean((-2, -1), keepdim=True)
        return x * self.outer(self.fc2(self.inner(self.fc1(scale))))  # type: ignore[no-any-return]


def mobilenet_v3_small(num_classes: int = 10, norm: str = "batch", channels: int = 3) -> MobileNetV3Small:
    """Return MobileNetV3-Small, Table 2 of Howard et al. (2019), with parameters named as torchvision names them.

    norm:     batch, or group (8 groups): then the loss of a sample does not depend on the others in its batch.
    channels: of the pictures, of any size.

    >>> sum(p.numel() for p in mobilenet_v3_small(10).parameters())
    1528106
    """
    return MobileNetV3Small(num_classes, choose("norm", norm, NORMS), channels)


def _convolution(
    width: int, out: int, kernel: int, norm: Norm, activation: type[nn.Module] | None, stride: int = 1
) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(width, out, kernel, stride, kernel // 2, bias=False), norm(out)]
    return nn.Sequential(*layers, *([activation()] if activation else []))

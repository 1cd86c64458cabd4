"""Blocks that take and return dicts, lists, named tuples, dataclasses, objects, None and caches changed in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from tests.harness import assert_same_training
from tests.harness.models import mlp_batch
from tests.scenarios.beside import everywhere


class _Pair(NamedTuple):
    hidden: Tensor
    extra: list[Tensor | None]


@dataclass
class _State:
    hidden: Tensor
    steps: int = 0
    seen: dict[str, Tensor] = field(default_factory=dict)


class _Opaque:
    """torch's tree functions do not look inside."""

    def __init__(self, secret: Tensor) -> None:
        self._secret = secret

    def open(self) -> Tensor:
        return self._secret


class _Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        return sum(self.keys[1:], self.keys[0])


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)


class _ToDict(_Layer):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": self.linear(x), "nested": [{"deep": (self.linear(x * 2), None)}], "name": "first"}


class _ToPair(_Layer):
    def forward(self, given: dict[str, Any]) -> _Pair:
        deep, nothing = given["nested"][0]["deep"]
        assert nothing is None
        return _Pair(self.linear(given["hidden"]), [deep, None])


class _ToState(_Layer):
    def forward(self, given: _Pair) -> _State:
        assert given.extra[0] is not None
        return _State(self.linear(given.hidden), 1, {"extra": given.extra[0]})


class _ToOpaque(_Layer):
    def forward(self, given: _State, *, scale: float | None = None) -> _Opaque:
        assert scale is None
        return _Opaque(self.linear(given.hidden) + given.seen["extra"])


class _IntoCache(_Layer):
    """Returns nothing: what it computed is in the cache."""

    def forward(self, given: _Opaque, cache: _Cache) -> None:
        cache.update(self.linear(given.open()))


class _All(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_dict, self.to_pair, self.to_state, self.to_opaque = _ToDict(), _ToPair(), _ToState(), _ToOpaque()
        self.into_cache = nn.ModuleList(_IntoCache() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        opaque = self.to_opaque(self.to_state(self.to_pair(self.to_dict(x))))
        cache = _Cache()
        for layer in self.into_cache:
            assert layer(opaque, cache) is None
        return cache.update(opaque.open())


class _ReturnsDict(_All):
    """The outermost module returns no tensor either."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": _Opaque(super().forward(x).square().mean()), "logits": None}


def _loss(model: Any, x: Tensor) -> Tensor:
    return model(x)["loss"].open()


@everywhere
def test_training(transport: str, world: int) -> None:
    for settings in ({}, {"resident_bytes": 0}):
        assert_same_training(
            _ReturnsDict, mlp_batch, loss=_loss, world=world, transport=transport, steps=3, config=settings
        )

"""What torchtitan asks of a dataloader: a nested config that builds its owner, and a Stateful iterable of pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.stateful import Stateful


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **runtime: Any) -> Any:
            if overlap := {field.name for field in fields(self)} & runtime.keys():
                raise ValueError(f"{overlap} are fields of the config")
            assert self._owner is not None
            return self._owner(config=replace(self), **runtime)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if config := cls.__dict__.get("Config"):
            if "__slots__" not in config.__dict__ or not all(field.kw_only for field in fields(config) if field.init):
                raise TypeError(f"{cls.__name__}.Config must use @dataclass(kw_only=True, slots=True)")
            config._owner = cls


class BaseDataLoader(Stateful, ABC, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataset: str = ""
        dataset_path: str | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]: ...

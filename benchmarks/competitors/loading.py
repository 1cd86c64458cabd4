"""B8: from a folder of safetensors to the first step."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.competitors.base import Job, optimizer_settings

__all__ = ["DeepSpeed", "Keeping", "Reading", "Zeropage", "ZeropagePretrained", "write_model"]

_TOKENS = 16


def config() -> Any:
    """A Llama of 0.25 G parameters: 1 GB in fp32."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=14, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=34000, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip


def write_model(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained(folder, max_shard_size="512MB")


class _Loading:
    """`cold`: the files are dropped from the page cache first."""

    engine: Any = None

    def __init__(self, job: Job, folder: str, *, cold: bool = False, train: bool = True) -> None:
        self.rank, self.world, self.cold, self.train = job.rank, job.world, cold, train
        self.folder = Path(folder)
        self.text = torch.arange(_TOKENS)[None] + 7 * self.rank

    def prepare(self, index: int) -> None:
        self.close()
        gc.collect()
        if self.rank == 0:
            for path in self.folder.glob("*.safetensors"):
                with path.open("rb", buffering=0) as file:
                    if self.cold:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    while not self.cold and file.read(1 << 20):
                        pass
        dist.barrier()

    def facts(self) -> dict[str, Any]:
        return {}

    def first_step(self) -> float | None:
        """The loss of it, if a step belongs to what is timed."""
        if not self.train:
            return None
        loss = self.engine(input_ids=self.text, labels=self.text).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss)

    def close(self) -> None: ...


class Reading(_Loading):
    """Rank 0 reads the bytes once, and keeps none; the others wait."""

    def once(self, index: int) -> None:
        if self.rank == 0:
            buffer = bytearray(16 << 20)
            for path in sorted(self.folder.glob("*.safetensors")):
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
        dist.barrier()


class Keeping(_Loading):
    """Each rank reads its part of the bytes into memory that nobody has touched before, as whoever keeps them must."""

    def once(self, index: int) -> None:
        self.held = []
        for path in sorted(self.folder.glob("*.safetensors")):
            part = path.stat().st_size // self.world
            memory = mmap.mmap(-1, part)
            with path.open("rb", buffering=0) as file:
                file.seek(part * self.rank)
                room = memoryview(memory)
                while room:
                    room = room[file.readinto(room) :]
            self.held.append(memory)
        dist.barrier()

    def close(self) -> None:
        self.held = []


class Zeropage(_Loading):
    def model(self) -> torch.nn.Module:
        from transformers import LlamaForCausalLM

        import zeropage as zp

        with torch.device("meta"):
            model = LlamaForCausalLM(config())
        zp.load_safetensors(zp.shard(model), self.folder)
        return model

    def once(self, index: int) -> float | None:
        import zeropage as zp

        model = self.model()
        self.engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), fused=True, **optimizer_settings()))
        return self.first_step()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class ZeropagePretrained(Zeropage):
    """With transformers' own `from_pretrained`, in the context."""

    def model(self) -> torch.nn.Module:
        from transformers import LlamaForCausalLM

        import zeropage as zp

        with zp.init():
            return LlamaForCausalLM.from_pretrained(self.folder, dtype=torch.float32)


class DeepSpeed(_Loading):
    """`zero.Init` by way of `HfDeepSpeedConfig` and `from_pretrained`."""

    def once(self, index: int) -> float | None:
        import deepspeed
        from transformers import LlamaForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        from benchmarks.competitors.deepspeed import settings_of

        settings = settings_of(zero_optimization={"stage": 3})
        self.hold = HfDeepSpeedConfig(settings)
        model = LlamaForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        return self.first_step()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None

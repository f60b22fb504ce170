"""Runs commands in this process, on the small models of conftest.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from typer.testing import CliRunner, Result

from qframework import cli
from qframework.evaluation import digits_vit

TINY = digits_vit.TrainingConfig(embed_dim=24, depth=1, epochs=1)
# A timm model of half a million weights for images of 160 x 160.
TIMM_MODEL = "test_vit"
FEW = ("--limit", "64", "--batches", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write_images(folder: Path, *classes: str) -> Path:
    """A folder for each class, with two random images."""
    for label in classes:
        (folder / label).mkdir(parents=True)
        for index in range(2):
            pixels = torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(folder / label / f"{index}.png")
    return folder

"""Every python block of the README and of the documentation runs, and every command in them exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COMPARISON = ROOT / "docs" / "comparison.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Line number of the first line and text of each fenced block in ``language``."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start("body")), match["body"])
        for match in FENCE.finditer(text)
        if match["language"] == language
    ]


def commands(program: str) -> list[str]:
    """Every distinct line of a bash block that runs ``program``."""
    lines = (line for page in PAGES for _, body in blocks(page, "bash") for line in body.splitlines())
    return sorted({line.split("#")[0].strip() for line in lines if line.split()[:1] == [program]})


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's ``test_vit`` has two transformer blocks instead of six: the other four would only take time."""
    import timm

    create = timm.create_model

    def create_model(name: str, *arguments: object, **options: object) -> object:
        return create(name, *arguments, **{**({"depth": 2} if name == "test_vit" else {}), **options})

    monkeypatch.setattr(timm, "create_model", create_model)


@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """In order and in one namespace per page; blank lines in front make a traceback point into the page."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__page__"}
    for line, body in blocks(page, "python"):
        exec(compile("\n" * line + body, str(page), "exec"), namespace)


@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "py")], ids=name)
def test_blocks_for_a_gpu_run_on_the_cpu(page: Path, fresh_dynamo: None) -> None:
    """Blocks marked ``py`` need a GPU and downloaded weights; here they run without both, on a small model."""
    import timm
    import torch

    namespace = {"timm": timm, "torch": torch, "images": torch.randn(2, 3, 160, 160)}
    for _, body in blocks(page, "py"):
        for here, there in {".half().cuda()": "", ", pretrained=True": "", "vit_base_patch16_224": "test_vit"}.items():
            body = body.replace(here, there)
        exec(compile(body, str(page), "exec"), namespace)
    assert namespace["logits"].shape == (2, 1000)  # type: ignore[attr-defined]


def table_rows(page: Path) -> set[str]:
    return {line for line in page.read_text().splitlines() if line.startswith("| ") and "---" not in line}


def test_the_rows_of_the_readme_are_those_of_the_comparison() -> None:
    """So that no figure is written twice and changed once."""
    readme = README.read_text().partition("[start:helps]")[2].partition("[end:helps]")[0]
    rows = [line for line in readme.splitlines() if line.startswith("| ") and "---" not in line]
    new = {row for row in rows if row not in table_rows(COMPARISON)}
    assert len(rows) > 12
    assert {row.split("|")[1].strip() for row in new} <= {"memory, accuracy, training"}


def test_the_comparison_has_the_stored_figures() -> None:
    """Figures of the table that generated pages hold as well."""
    from benchmarks import report, report_targets, target_table

    runs = report.load_runs(report.RESULTS)
    comparison = COMPARISON.read_text()
    for what, against, shown, processor in (
        ("vit_base_patch16_224, batch 256, static", "best of FP16 compiled and torchao FP8", "2.06", ""),
        ("vit_base_patch16_224, batch 256, dynamic", "best of FP16 compiled and torchao FP8", "1.42", ""),
        ("vit_large_patch16_224, batch 256, static", "best of FP16 compiled and torchao FP8", "1.81", ""),
        ("vit_large_patch16_224, batch 256, dynamic", "best of FP16 compiled and torchao FP8", "1.33", ""),
        ("INT8 GEMM, M = 1576, fp16 out", "best of bf16, FP8, _int_mm", "0.99", ""),
        ("vit_base_patch16_224, batch 8, on a CPU, static", "FP32 eager", "4.8", "Intel"),
        ("vit_base_patch16_224, batch 8, on a CPU, static", "FP32 eager", "3.6", "AMD"),
    ):
        (target,) = (each for each in target_table.TARGETS if (each.what, each.against) == (what, against))
        outcome, _ = report_targets.newest(target, [run for run in runs if processor in str(run.machine.get("cpu"))])
        assert outcome is not None
        assert f"{outcome.mean:.{len(shown) - 2}f}" == shown
        assert f"| {shown} |" in comparison


def test_the_comparison_has_the_first_calls_of_the_newest_run() -> None:
    from benchmarks import report, report_targets, target_table

    runs = report.load_runs(report.RESULTS)
    (row,) = (row for row in table_rows(COMPARISON) if "first call" in row)
    for mode in ("static", "dynamic"):
        (target,) = (each for each in target_table.TARGETS if each.what.endswith(f"first call, {mode}"))
        outcome, where = report_targets.newest(target, runs, any_device=True)
        assert outcome is not None
        assert "h200" in where
        assert "H200" in row
        assert " and ".join(f"{ratio:.2f}" for ratio in sorted(outcome.ratios)) in row


ARCHITECTURES = {
    "SAM-B's image encoder, 4 images": "samvit_base_patch16",
    "SAM-L's and SAM-H's, 4 images": "samvit_large_patch16 samvit_huge_patch16",
    "Swin-B, 128 images": "swin_base_patch4_window7_224",
    "BERT-large, 32 padded sequences": "bert_large",
    "Llama 1B, prefill of 4 prompts of 2,048 tokens": "llama_1b",
    "GPT-2, 8 prompts of 1,024 tokens": "gpt2",
    "SwinV2-B, 64 images": "swinv2_base_window8_256",
    "ViT-S/16, 256 images": "vit_small_patch16_224",
    "Hiera-B, 128 images": "hiera_base_224",
    "ConvNeXt-B, 128 images": "convnext_base",
    "MViTv2-B, 64 images": "mvitv2_base",
    "SAM 2's encoder, base plus, 4 images": "sam2_hiera_base_plus",
    "ConvNeXt V2-B, 64 images": "convnextv2_base",
    "TNT-B, 64 images": "tnt_b_patch16_224",
    "PVT v2-B3, SegFormer-B3 and PiT-B": "pvt_v2_b3 segformer_b3 pit_b_224",
    "CAFormer-B36 and EfficientFormerV2-L, mostly convolutions": "caformer_b36 efficientformerv2_l",
}


def test_rows_of_architectures_are_of_the_newest_runs() -> None:
    """Static and dynamic, as docs/families.md has them, and the geometric means."""
    from benchmarks import report_families
    from benchmarks.families_cases import FAMILIES
    from benchmarks.report import RESULTS, load_runs
    from benchmarks.tables import number

    devices = report_families.devices(load_runs(RESULTS / report_families.FOLDER))
    (device,) = (each for each in devices if "H100" in each.name)
    cases = {case["fp16"].record.model: case for case in device.cases if case["fp16"].record.batch != 1}
    comparison = COMPARISON.read_text()
    for label, names in ARCHITECTURES.items():
        chosen = [cases[name] for name in names.split()]
        cells = [
            ", ".join(f"{round(report_families.relative(case, mode), 2):g}" for case in chosen)
            for mode in ("static", "dynamic")
        ]
        (row,) = (line for line in comparison.splitlines() if line.startswith(f"| {label}, H100"))
        assert f"| {cells[0]} | {cells[1]} |" in row, label
    (row,) = (line for line in comparison.splitlines() if line.startswith("| PVT v2-B3, SegFormer-B3 and PiT-B"))
    for mode in ("static", "dynamic"):
        measured = (cases[name][mode] for name in ARCHITECTURES["PVT v2-B3, SegFormer-B3 and PiT-B"].split())
        kernels = [f"{each.base.kernels_ms / each.record.kernels_ms:.2f}" for each in measured]
        assert f"{', '.join(kernels)} {mode}" in row
    many = [case for name, case in cases.items() if FAMILIES[name].kind != report_families.DECODING]
    single = [case for case in device.cases if report_families._use(case) == "batch 1"]
    for chosen, begin in ((many, f"| {len(many)} architectures"), (single, f"| {len(single)} of them at batch 1")):
        means = {mode: number(report_families._mean(chosen, mode)) for mode in report_families.OURS}
        (row,) = (line for line in comparison.splitlines() if line.startswith(begin))
        assert f"without INT8 linears, {means['float']} | {means['static']} | {means['dynamic']} |" in row


@pytest.mark.parametrize("command", commands("qframework"))
def test_commands_parse(command: str) -> None:
    """The subcommand exists and accepts the options and arguments shown; nothing is executed."""
    import typer.main

    from qframework.cli import app

    group = typer.main.get_command(app)
    subcommand, *arguments = shlex.split(command)[1:]
    assert subcommand in group.commands
    group.commands[subcommand].make_context(subcommand, arguments)


@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_exist(command: str) -> None:
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_blocks_are_found() -> None:
    """Without blocks, the tests above would pass without testing anything."""
    assert len(blocks(README, "python")) >= 4
    assert {"make demo", "make test"} <= set(commands("make"))
    assert commands("qframework")


def test_the_start_page_links_every_page() -> None:
    pages = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2])) - {"index.md"}
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", (ROOT / "docs" / "index.md").read_text()))
    assert linked >= pages > {"quickstart.md", "api/errors.md"}

"""The main job on a small real model: right numbers, nothing done twice, nothing lost, clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from harness.digest import file_digest
from harness.errors import CaptureError, IncomparableError, PanelError, Refused, UsageError
from harness.measure import run as measure_module
from harness.measure import teacher as teacher_module
from harness.measure.run import Request, measure
from harness.panel import load_panel


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty working folder: captures and reports land in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def candidate_folder(tmp_path_factory, teacher_folder) -> Path:
    """The teacher with every MLP weight rounded to 4 bits a group: a plain dense candidate."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-rtn"
    shutil.copytree(teacher_folder, folder)
    model = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if "mlp" in name:
            scale = weight.data.float().abs().amax(dim=1, keepdim=True) / 7
            weight.data = (torch.round(weight.data.float() / scale) * scale).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def request(candidate: Path, panel: Path, teacher: Path, **options) -> Request:
    return Request(candidate=str(candidate), panel=panel, teacher=str(teacher), **options)


def plain_scores(teacher: Path, candidate: Path, panel: Path) -> dict[str, np.ndarray]:
    """KL, NLL and agreement of every position by plain transformers and float64 log-softmax."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (teacher, candidate)]
    out: dict[str, list[np.ndarray]] = {"kl": [], "nll_teacher": [], "nll_candidate": [], "agree": []}
    for row in load_panel(panel).rows:
        ids = torch.from_numpy(row.ids_T.astype(np.int64))[None]
        with torch.inference_mode():
            p, q = (m(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1) for m in models)
        target = ids[0, 1:, None]
        out["kl"].append((p.exp() * (p - q)).sum(-1).numpy())
        out["nll_teacher"].append(-p.gather(1, target)[:, 0].numpy())
        out["nll_candidate"].append(-q.gather(1, target)[:, 0].numpy())
        out["agree"].append((p.argmax(-1) == q.argmax(-1)).numpy())
    return {name: np.concatenate(parts) for name, parts in out.items()}


def test_numbers_equal_plain_transformers(workplace, teacher_folder, candidate_folder, panel_folder):
    """Every position against float64 log-softmax of both models' own logits; PPL to 1e-6 relative."""
    result = measure(request(candidate_folder, panel_folder, teacher_folder))
    table = pq.read_table(result.folder / "positions.parquet")
    truth = plain_scores(teacher_folder, candidate_folder, panel_folder)
    for name in ("kl", "nll_teacher", "nll_candidate"):
        np.testing.assert_allclose(table[name].to_numpy(), truth[name], atol=2e-6, err_msg=name)
    assert (table["agree"].to_numpy() == truth["agree"]).mean() > 0.995
    assert truth["kl"].mean() > 1e-3
    found = result.measurement.summary
    assert found["kl_mean"] == pytest.approx(truth["kl"].mean(), rel=1e-5)
    assert found["ppl_token_teacher"] == pytest.approx(np.exp(truth["nll_teacher"].mean()), rel=1e-6)
    assert result.measurement.status == "complete" and result.measurement.positions == 4 * 95


def make_dense(exl3: Path, source: Path, target: Path) -> None:
    """The EXL3 folder's decoded weights as a plain float32 checkpoint: decoded here, one tensor after another."""
    from safetensors.torch import save_file

    from harness.exl3.checkpoint import open_checkpoint
    from harness.exl3.decode import dense_weight

    checkpoint = open_checkpoint(exl3)
    tensors = {name: checkpoint.tensor(name).float() for name in checkpoint.plain}
    tensors |= {f"{name}.weight": dense_weight(checkpoint.linear(name), torch.float32) for name in checkpoint.modules}
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"memory_budget": "auto"}], ids=["dense", "packed", "outer"])
def test_exl3_equals_its_dense_weights_in_plain_transformers(
    workplace, teacher_folder, exl3_folder, panel_folder, options
):
    """An EXL3 candidate, decoded at load, at every use, or layer by layer: the numbers of its dense weights."""
    make_dense(exl3_folder, teacher_folder, Path("dense"))
    truth = plain_scores(teacher_folder, Path("dense"), panel_folder)
    result = measure(request(exl3_folder, panel_folder, teacher_folder, **options))
    table = pq.read_table(result.folder / "positions.parquet")
    np.testing.assert_allclose(table["kl"].to_numpy(), truth["kl"], atol=2e-6)
    found = result.measurement
    assert found.summary["kl_mean"] == pytest.approx(truth["kl"].mean(), abs=1e-6)
    assert found.summary["nll_candidate"] == pytest.approx(truth["nll_candidate"].mean(), abs=1e-6)
    assert found.candidate.engine == "exl3" and truth["kl"].mean() > 1e-3


def test_self_compare_is_exactly_zero(workplace, teacher_folder, panel_folder):
    """A model against its own capture: KL 0.0 and top-1 1.0 at every position, and the receipt asks why."""
    result = measure(request(teacher_folder, panel_folder, teacher_folder))
    table = pq.read_table(result.folder / "positions.parquet")
    assert (table["kl"].to_numpy() == 0.0).all() and table["agree"].to_numpy().all()
    assert (table["tv"].to_numpy() == 0.0).all() and (table["rank"].to_numpy() == 1).all()
    assert result.measurement.summary["top1_agreement"] == 1.0
    assert "same model" in result.measurement.notes[0]


def test_rerun_recomputes_nothing_and_keeps_the_bytes(
    workplace, teacher_folder, candidate_folder, panel_folder, monkeypatch
):
    first = measure(request(candidate_folder, panel_folder, teacher_folder))
    before = {p.name: p.read_bytes() for p in first.folder.iterdir() if p.is_file()}

    def never(*_args, **_options):
        raise AssertionError("a model was opened for a finished measurement")

    monkeypatch.setattr(measure_module, "open_engine", never)
    monkeypatch.setattr(teacher_module, "ensure_capture", never)
    again = measure(request(candidate_folder, panel_folder, teacher_folder))
    assert again.reused and again.folder == first.folder
    assert {p.name: p.read_bytes() for p in first.folder.iterdir() if p.is_file()} == before


def test_interrupted_run_resumes_to_the_same_bytes(
    workplace, teacher_folder, candidate_folder, panel_folder, monkeypatch
):
    """Killed after two rows, the run goes on at the third and ends bit-identical."""
    whole = measure(request(candidate_folder, panel_folder, teacher_folder, out=Path("whole")))
    real, calls = measure_module.write_row, []

    def dies(*args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args[2].index)
        real(*args)

    monkeypatch.setattr(measure_module, "write_row", dies)
    with pytest.raises(KeyboardInterrupt):
        measure(request(candidate_folder, panel_folder, teacher_folder, out=Path("killed")))
    assert sorted(p.name for p in Path("killed/rows").glob("*.parquet")) == ["row-0000.parquet", "row-0001.parquet"]
    calls.clear()
    monkeypatch.setattr(measure_module, "write_row", lambda *args: (calls.append(args[2].index), real(*args)))
    measure(request(candidate_folder, panel_folder, teacher_folder, out=Path("killed")))
    assert calls == [2, 3]
    positions = [file_digest(Path(f) / "positions.parquet") for f in ("whole", "killed")]
    assert positions[0] == positions[1]
    assert file_digest(Path("whole/measurement.json")) == file_digest(Path("killed/measurement.json"))
    told = [json.loads((Path(f) / "run.json").read_text())["teacher"] for f in ("whole", "killed")]
    assert told[0] == "captured in this run" and told[1].startswith("rows [0, 3]: top1_exact_all_rows")
    assert whole.measurement.key == json.loads(Path("killed/measurement.json").read_text())["key"]


def test_fewer_rows_are_labelled_partial(workplace, teacher_folder, candidate_folder, panel_folder):
    result = measure(request(candidate_folder, panel_folder, teacher_folder, rows=2))
    assert result.measurement.label == "partial 2/4 rows"
    assert result.folder.name.endswith("-rows2")
    with pytest.raises(UsageError, match="--rows 9"):
        measure(request(candidate_folder, panel_folder, teacher_folder, rows=9))


def test_capture_that_is_there_is_reproduced_first(workplace, teacher_folder, candidate_folder, panel_folder):
    measure(request(candidate_folder, panel_folder, teacher_folder, rows=2))
    full = measure(request(candidate_folder, panel_folder, teacher_folder))
    line = json.loads((full.folder / "run.json").read_text())["teacher"]
    assert "top1_exact_all_rows" in line and "max |change of NLL| 0 " in line
    assert full.measurement.preflight[-1].figure.startswith("made by these weights, or reproduced by them")


def test_teacher_that_no_longer_reproduces_is_refused(workplace, teacher_folder, candidate_folder, panel_folder):
    """One flipped argmax in the teacher's store stops the run before the candidate."""
    from harness.capture import rowfile

    measure(request(candidate_folder, panel_folder, teacher_folder, rows=2))
    folder = next(Path("teachers/captures").glob("tiny-teacher-tiny-*"))
    assert rowfile is not None
    path = folder / "row-0000.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CaptureError, match="row-0000"):
        measure(request(candidate_folder, panel_folder, teacher_folder))


def test_nan_logits_make_the_result_invalid(workplace, teacher_folder, panel_folder, tmp_path):
    """NaN is counted and located, the status says invalid, the mean is not a number."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "nan-model"
    shutil.copytree(teacher_folder, folder)
    model = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.bfloat16)
    rows = load_panel(panel_folder).rows
    rare = next(int(i) for i in rows[3].ids_T if all(i not in row.ids_T for row in rows[:3]))
    model.model.embed_tokens.weight.data[rare] = float("nan")
    model.save_pretrained(folder)
    found = measure(request(folder, panel_folder, teacher_folder)).measurement
    assert found.status == "invalid"
    assert np.isnan(found.summary["kl_mean"]) and found.intervals == {}
    assert 0 < found.counts["nonfinite_positions"] == sum(row.nonfinite for row in found.per_row)
    assert np.isfinite(found.summary["kl_mean_finite"]) and 0 < found.summary["finite_share"] < 1


def test_damaged_positions_are_found(workplace, teacher_folder, candidate_folder, panel_folder):
    result = measure(request(candidate_folder, panel_folder, teacher_folder))
    path = result.folder / "positions.parquet"
    path.write_bytes(path.read_bytes()[:-10] + b"0123456789")
    with pytest.raises(Refused, match="positions.parquet is not what"):
        measure(request(candidate_folder, panel_folder, teacher_folder))


def test_folder_of_another_measurement_is_refused(workplace, teacher_folder, candidate_folder, panel_folder):
    measure(request(candidate_folder, panel_folder, teacher_folder, out=Path("run")))
    with pytest.raises(IncomparableError, match="holds the measurement"):
        measure(request(teacher_folder, panel_folder, teacher_folder, out=Path("run")))


def test_other_tokenizer_is_refused(workplace, teacher_folder, panel_folder, tmp_path):
    """Same model files, another tokenizer: both digests are named."""
    folder = tmp_path / "other-tokenizer"
    shutil.copytree(teacher_folder, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(PanelError, match="not sealed for tokenizer"):
        measure(request(folder, panel_folder, teacher_folder))


def test_renaming_changes_nothing(workplace, teacher_folder, candidate_folder, panel_folder, tmp_path):
    """The key is made of contents: a renamed candidate folder has the same one."""
    moved = tmp_path / "another-name"
    shutil.copytree(candidate_folder, moved)
    a = measure(request(candidate_folder, panel_folder, teacher_folder, out=Path("a")))
    b = measure(request(moved, panel_folder, teacher_folder, out=Path("b")))
    assert a.measurement.key == b.measurement.key
    assert file_digest(Path("a/positions.parquet")) == file_digest(Path("b/positions.parquet"))


def test_receipt_names_no_path(workplace, teacher_folder, candidate_folder, panel_folder, tmp_path):
    """A receipt can be published as it is."""
    result = measure(request(candidate_folder, panel_folder, teacher_folder))
    for file in ("measurement.json", "run.json"):
        text = (result.folder / file).read_text()
        assert str(tmp_path) not in text and str(teacher_folder.parent) not in text and "/home" not in text

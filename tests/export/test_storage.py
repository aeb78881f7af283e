import copy
import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from data_parallel import parallel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import strucspars as ss
from strucspars.export.storage import FORMAT_KEY, PLAN_KEY, VERSION_KEY


def network(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, width, 3),
        nn.Conv2d(width, 8, 1, bias=False),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 4),
    )


def converted(seed: int = 0) -> nn.Sequential:
    model = network(seed)
    model(torch.randn(4, 3, 8, 8))  # batch-norm statistics of their own
    ss.convert_(model, ss.one_shot_plan(model, target=0.4))
    return model.eval()


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_a_loaded_model_equals_the_saved_one(tmp_path: Path) -> None:
    model = converted()
    ss.save(model, tmp_path / "small.safetensors")
    restored = ss.load(tmp_path / "small.safetensors", network(seed=5)).eval()
    assert torch.equal(restored(IMAGES), model(IMAGES))
    torch.testing.assert_close(restored.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert ss.model_plan(restored) == ss.model_plan(model)


def test_the_file_shrinks_with_the_model(tmp_path: Path) -> None:
    ss.save(network(), tmp_path / "dense.safetensors")
    ss.save(converted(), tmp_path / "small.safetensors")
    sizes = [sum(t.nbytes for t in load_file(tmp_path / f"{name}.safetensors").values()) for name in ("dense", "small")]
    assert sizes[1] < sizes[0]


def test_a_dense_model_can_be_saved_too(tmp_path: Path) -> None:
    model = network().eval()
    ss.save(model, tmp_path / "dense.safetensors")
    assert torch.equal(ss.load(tmp_path / "dense.safetensors", network(3)).eval()(IMAGES), model(IMAGES))


def test_tied_weights_and_channels_last_survive(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        first, last = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        last.weight = first.weight
        return nn.Sequential(first, nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3), last).to(memory_format=torch.channels_last)

    model = tied()
    ss.convert_(model, ss.one_shot_plan(model, target=0.3))
    ss.save(model, tmp_path / "tied.safetensors")
    restored = ss.load(tmp_path / "tied.safetensors", tied())
    assert restored.get_parameter("0.weight") is restored.get_parameter("3.weight")
    features = torch.randn(1, 4, 16, 16)
    torch.testing.assert_close(restored(features), model(features))


def test_tied_weights_that_are_no_numbers_survive(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    model[1].weight = model[0].weight
    nn.init.constant_(model[0].get_parameter("weight"), float("nan"))
    ss.save(model, tmp_path / "tied.safetensors")
    assert ss.load(tmp_path / "tied.safetensors", model)[1].get_parameter("weight").isnan().all()


def rewritten(path: Path, change: Any) -> None:
    """Write the file again with its tensors and plan changed."""
    tensors = load_file(path)
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    metadata = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def hostile_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")


def pickled(path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, path)


def newer(path: Path) -> None:
    def change(tensors: Any, metadata: Any) -> None:
        metadata[PLAN_KEY] = metadata[PLAN_KEY].replace('"format_version": 2', '"format_version": 7')

    rewritten(path, change)


def of_older_storage(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: metadata.pop(FORMAT_KEY))


def without_plan(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: metadata.pop(PLAN_KEY))


def missing_tensor(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors.pop("3.weight"))


def unknown_tensor(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors.update({"4.bias": torch.zeros(8)}))


def wrong_shape(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors.update({"3.bias": torch.zeros(3)}))


def wrong_order(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors["3.in_perm"].fill_(10**6))


def wrong_order_of_outputs(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors["3.out_inverse"].fill_(10**6))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (truncated, "not a readable safetensors file, or damaged"),
        (hostile_header, "not a readable safetensors file, or damaged"),
        (pickled, "not a readable safetensors file, or damaged"),
        (newer, "format_version: must be 2, got 7; upgrade strucspars"),
        (of_older_storage, "storage format 1, this version reads format 2; save the network again"),
        (without_plan, "carries no plan"),
        (missing_tensor, r"lacks \['3.weight'\]"),
        (unknown_tensor, r"belongs to another network: it lacks \[\] and has \['4.bias'\] in addition"),
        (wrong_shape, r"'3.bias' is torch.float32 \(3,\), the model needs torch.float32 \(16,\)"),
        (wrong_order, "'3.in_perm' contradicts the file's own plan"),
        (wrong_order_of_outputs, "'3.out_inverse' contradicts the file's own plan"),
    ],
)
def test_a_bad_file_is_refused_and_the_model_stays_as_it_was(tmp_path: Path, damage: Any, complaint: str) -> None:
    path = tmp_path / "small.safetensors"
    ss.save(converted(), path)
    damage(path)
    model = network(seed=2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=complaint):
        ss.load(path, model)
    assert type(model[3]) is nn.Conv2d
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_another_network_is_refused(tmp_path: Path) -> None:
    ss.save(converted(), tmp_path / "small.safetensors")
    with pytest.raises(ValueError, match=r"belongs to another network: layer '3': its weight is \(32, 8, 3, 3\)"):
        ss.load(tmp_path / "small.safetensors", network(width=32))
    with pytest.raises(ValueError, match=r"belongs to another network: layer '\d' of the plan is not in the network"):
        ss.load(tmp_path / "small.safetensors", nn.Sequential(nn.Conv2d(3, 8, 3)))


def test_what_is_no_file_of_ours_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is no saved network at {tmp_path}"):
        ss.load(tmp_path, network())
    save_file(network().state_dict(), tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match=r"was not written by strucspars\.save: it carries no plan"):
        ss.load(tmp_path / "plain.safetensors", network())


def test_the_file_tells_the_version_that_wrote_it(tmp_path: Path) -> None:
    ss.save(network(), tmp_path / "dense.safetensors")
    with safe_open(tmp_path / "dense.safetensors", framework="pt") as file:
        assert file.metadata()[VERSION_KEY] == ss.__version__


def test_names_in_any_script_survive(tmp_path: Path) -> None:
    def build() -> nn.ModuleDict:
        return nn.ModuleDict({"größe \N{SNOWMAN}": nn.Linear(2, 2)})

    model = build()
    ss.save(model, tmp_path / "named.safetensors")
    restored = ss.load(tmp_path / "named.safetensors", build())
    torch.testing.assert_close(restored.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_file_in_half_precision_loads_into_a_network_in_full(tmp_path: Path) -> None:
    model = converted().half()
    ss.save(model, tmp_path / "half.safetensors")
    restored = ss.load(tmp_path / "half.safetensors", network(seed=5))
    torch.testing.assert_close(restored[3].weight, model[3].weight.float(), rtol=0, atol=0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no saved network at .*nowhere"):
        ss.load(tmp_path / "nowhere.safetensors", network())


def test_a_failed_write_keeps_the_old_file_and_leaves_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.safetensors"
    ss.save(converted(), path)
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(
        OSError,
        match=r"cannot write .*small\.safetensors: No space left on device; what was there is kept; free some space",
    ):
        ss.save(network(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "small.safetensors"
    link.symlink_to("there/small.safetensors")
    ss.save(network(), link)
    assert link.is_symlink()
    loaded = ss.load(tmp_path / "there" / "small.safetensors", network(1))
    torch.testing.assert_close(loaded.state_dict(), network().state_dict(), rtol=0, atol=0)


def test_the_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    model = converted()
    contents = set()
    # The library's own order is by chance: ten equal ones would be one in five hundred.
    for k in range(10):
        ss.save(model, tmp_path / f"{k}.safetensors")
        contents.add((tmp_path / f"{k}.safetensors").read_bytes())
    assert len(contents) == 1
    (content,) = contents
    assert int.from_bytes(content[:8], "little") % 8 == 0


def test_a_masked_model_is_not_saved_as_if_it_were_small(tmp_path: Path) -> None:
    model = network()
    ss.mask_(model, ss.one_shot_plan(model, target=0.4))
    with pytest.raises(ValueError, match=r"layer '\d' is masked, not grouped; call convert_"):
        ss.save(model, tmp_path / "masked.safetensors")


def test_a_shared_module_survives(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        shared = nn.Conv2d(4, 4, 1)
        return nn.Sequential(shared, nn.ReLU(), shared)

    model = build()
    ss.convert_(model, ss.one_shot_plan(model, target=0.3))
    ss.save(model, tmp_path / "shared.safetensors")
    restored = ss.load(tmp_path / "shared.safetensors", build())
    features = torch.randn(1, 4, 3, 3)
    assert torch.equal(restored(features), model(features))


def test_only_a_dense_model_with_memory_is_loaded_into(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    ss.save(converted(), path)
    masked = network()
    ss.mask_(masked, ss.one_shot_plan(masked, target=0.4))
    for model in (masked, converted(seed=3)):
        with pytest.raises(ValueError, match="is grouped or masked already; load into a freshly built one"):
            ss.load(path, model)
    with pytest.raises(ValueError, match=r"is on the meta device; call model\.to_empty\(device="):
        ss.load(path, network().to("meta"))


@pytest.mark.parametrize(
    ("name", "dtype", "needed"),
    [
        ("3.weight", torch.int8, torch.float32),
        ("3.bias", torch.complex64, torch.float32),
        ("1.num_batches_tracked", torch.complex64, torch.int64),
    ],
)
def test_numbers_of_another_kind_are_refused(
    tmp_path: Path, name: str, dtype: torch.dtype, needed: torch.dtype
) -> None:
    path = tmp_path / "small.safetensors"
    ss.save(converted(), path)
    rewritten(path, lambda tensors, metadata: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"'{name}' is {dtype} .*, the model needs {needed}"):
        ss.load(path, network())


def test_the_plans_target_and_threshold_are_kept_if_given(tmp_path: Path) -> None:
    model = network()
    plan = ss.one_shot_plan(model, target=0.4)
    ss.convert_(model, plan)
    ss.save(model, tmp_path / "small.safetensors", plan=plan)
    with safe_open(tmp_path / "small.safetensors", framework="pt") as file:
        assert ss.GroupingPlan.from_json(file.metadata()[PLAN_KEY]) == plan
    assert torch.equal(ss.load(tmp_path / "small.safetensors", network(2)).eval()(IMAGES), model.eval()(IMAGES))
    with pytest.raises(ValueError, match="not the one that the model was converted with"):
        ss.save(model, tmp_path / "small.safetensors", plan=ss.one_shot_plan(network(), target=0.1))


def test_a_state_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    with pytest.raises(ValueError, match="'_extra_state' of the model's state is a dict"):
        ss.save(Extra(2, 2), tmp_path / "extra.safetensors")


def test_a_model_that_is_itself_a_grouped_layer_is_saved_and_loaded(tmp_path: Path) -> None:
    layer = nn.Conv2d(4, 8, 3)
    ss.convert_(layer, ss.one_shot_plan(layer, target=0.4))
    ss.save(layer, tmp_path / "layer.safetensors")
    restored = ss.load(tmp_path / "layer.safetensors", nn.Conv2d(4, 8, 3))
    assert torch.equal(restored(IMAGES[:, :1].expand(2, 4, 8, 8)), layer(IMAGES[:, :1].expand(2, 4, 8, 8)))


def test_a_plan_may_name_a_shared_module_by_its_second_name(tmp_path: Path) -> None:
    def shared() -> nn.Sequential:
        layer = nn.Conv2d(8, 8, 1)
        return nn.Sequential(layer, nn.ReLU(), layer)

    model = shared()
    found = ss.one_shot_plan(model, target=0.4)
    plan = replace(found, layers={"2": found.layers["0"]})
    ss.convert_(model, plan)
    ss.save(model, tmp_path / "shared.safetensors", plan=plan)
    images = torch.randn(1, 8, 3, 3)
    assert torch.equal(ss.load(tmp_path / "shared.safetensors", shared())(images), model(images))
    both = replace(found, layers={"0": found.layers["0"], "2": found.layers["0"]})
    with pytest.raises(ValueError, match="layers '0' and '2' of the plan are one shared module; keep one"):
        ss.save(model, tmp_path / "shared.safetensors", plan=both)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot write .*missing.x\.safetensors: .*; create its folder"):
        ss.save(network(), tmp_path / "missing" / "x.safetensors")


def compiled(model: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(model, backend="eager"))


WRAPPERS = [compiled, parallel, lambda model: compiled(parallel(model))]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_model_is_saved_under_the_names_of_the_bare_one(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = converted()
    ss.save(wrap(model), tmp_path / "small.safetensors")
    restored = ss.load(tmp_path / "small.safetensors", network(seed=5)).eval()
    torch.testing.assert_close(restored.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert ss.model_plan(restored) == ss.model_plan(model)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_model_is_loaded_into_like_the_bare_one(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model, bare = converted(), network(seed=5)
    ss.save(model, tmp_path / "small.safetensors")
    wrapped = wrap(bare)
    assert ss.load(tmp_path / "small.safetensors", wrapped) is wrapped
    torch.testing.assert_close(bare.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("plan_of_the_wrapped", [True, False])
@pytest.mark.parametrize("build", [lambda: nn.ModuleDict({"module": network()}), lambda: nn.Conv2d(4, 8, 1)])
def test_a_plan_is_saved_under_bare_names_whichever_model_it_was_made_of(
    tmp_path: Path,
    wrap: Callable[[nn.Module], nn.Module],
    plan_of_the_wrapped: bool,
    build: Callable[[], nn.Module],
) -> None:
    bare = build()
    wrapped = wrap(bare)
    planned = wrapped if plan_of_the_wrapped else bare
    plan = ss.one_shot_plan(planned, target=0.4)
    ss.convert_(planned, plan)
    ss.save(wrapped, tmp_path / "small.safetensors", plan=plan)
    restored = ss.load(tmp_path / "small.safetensors", build())
    torch.testing.assert_close(restored.state_dict(), bare.state_dict(), rtol=0, atol=0)
    with safe_open(tmp_path / "small.safetensors", framework="pt") as file:
        assert ss.GroupingPlan.from_json(file.metadata()[PLAN_KEY]).target == 0.4


def wrapped_in_parts(model: nn.Sequential, wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    """The same modules, some of them wrapped."""
    return nn.Sequential(*(wrap(layer) if isinstance(layer, nn.Conv2d) else layer for layer in model))


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("wrap_all", [True, False])
def test_a_model_with_wrapped_parts_is_saved_and_loaded_like_the_bare_one(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], wrap_all: bool
) -> None:
    def partly(model: nn.Sequential) -> nn.Module:
        return wrap(wrapped_in_parts(model, wrap)) if wrap_all else wrapped_in_parts(model, wrap)

    model = converted()
    for name, saved in (("bare", model), ("partly", partly(model))):
        ss.save(saved, tmp_path / name)
    assert load_file(tmp_path / "partly").keys() == load_file(tmp_path / "bare").keys() == model.state_dict().keys()
    for path in (tmp_path / "bare", tmp_path / "partly"):
        fresh = [network(seed=5), network(seed=6)]
        ss.load(path, fresh[0])
        ss.load(path, partly(fresh[1]))
        for restored in fresh:
            torch.testing.assert_close(restored.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_model_with_a_wrapped_part_stays_as_it_was_where_the_file_is_bad(tmp_path: Path) -> None:
    ss.save(converted(), tmp_path / "small.safetensors")
    missing_tensor(tmp_path / "small.safetensors")
    model = wrapped_in_parts(network(seed=2), nn.DataParallel)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"lacks \['3.weight'\]"):
        ss.load(tmp_path / "small.safetensors", model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("build", [network, converted])
def test_a_model_on_the_meta_device_is_not_saved(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    told = (
        r"'0\.weight' of the model is on the meta device, .* call model\.to_empty\(device=\.\.\.\) and load the weights"
    )
    with pytest.raises(ValueError, match=told):
        ss.save(build().to("meta"), tmp_path / "small.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_grouped_layer_with_a_parametrisation_is_refused_by_name_and_saved_without_it(tmp_path: Path) -> None:
    model = converted()
    parametrizations.spectral_norm(model[3])
    with pytest.raises(ValueError, match=r"layer '3' has no plain weight: .*, or remove the parametrisation"):
        ss.save(model, tmp_path / "small.safetensors")
    assert not list(tmp_path.iterdir())
    parametrize.remove_parametrizations(model[3], "weight")
    ss.save(model, tmp_path / "small.safetensors")
    assert torch.equal(ss.load(tmp_path / "small.safetensors", network(seed=5)).eval()(IMAGES), model(IMAGES))


@pytest.mark.parametrize("buffer", [torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_a_tensor_that_the_format_does_not_hold_is_named(buffer: torch.Tensor, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    model[0].register_buffer("odd", buffer)
    with pytest.raises(ValueError, match=rf"'0\.odd' of the model is a tensor of {buffer.layout} and {buffer.dtype}"):
        ss.save(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


class OfTwoVersions(nn.Sequential):
    """Insists on the version of its state, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        assert local_metadata.get("version") == 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


def test_the_versions_of_a_state_are_kept(tmp_path: Path) -> None:
    model = nn.Sequential(parallel(OfTwoVersions(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))))
    ss.save(model, tmp_path / "model.safetensors")
    fresh = nn.Sequential(OfTwoVersions(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)))
    ss.load(tmp_path / "model.safetensors", fresh)
    assert torch.equal(fresh.get_parameter("0.0.weight"), model.get_parameter("0.module.0.weight"))

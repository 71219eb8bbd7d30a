"""Images are decoded, cropped at random on the device, and trained as in plain
PyTorch."""

import io
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, pipeline
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from flatout.engine.arrays.recipes import array_recipes
from flatout.engine.arrays.sources import ArraysError
from flatout.engine.families import family_of
from flatout.engine.families._modeling.crops import gathered, sampled
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.building import ModelError, build, load_pretrained
from flatout.engine.models.flops import ModelFlops
from flatout.engine.parameters import SettingsError
from flatout.engine.rows import decoding
from flatout.engine.rows.decoding import BadImage, Decoder
from flatout.engine.train.setup.assemble import build_model
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.setup.resolved_config import resolve
from tests.engine.plain import step_losses
from tests.engine.runs import changed, curve
from tests.golden.configurations import CONVNEXT, RESNET
from tests.make import samples_job, samples_settings

VIT = {
    "model_type": "vit",
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def settings_of(
    config=VIT, *, crop_area=1.0, flip=0.5, keep="pixels", channels=3, **train
):
    model = {"task": "image-classification", "config": config}
    model |= {"crop_area": crop_area, "flip_probability": flip}
    images = {"size": 8, "keep": keep, "channels": channels}
    return samples_settings("images", model, images=images, train=train)


@cache
def encoded(count):
    """Return two classes of noise, one of them darker."""
    generator, found = np.random.default_rng(2), []
    for number in range(count):
        light = 40 + 100 * (number % 2)
        values = generator.integers(0, light, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(values).save(file := io.BytesIO(), "png")
        found.append(file.getvalue())
    return found


def pictures(folder, count=120):
    for number, content in enumerate(encoded(count)):
        place = folder / ("dark", "light")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:03d}.png").write_bytes(content)
    return folder


def split(path, settings):
    return array_recipes(path, settings.split, settings.images, settings.model)


@pytest.fixture
def raw(tmp_path):
    """A folder of sixty images."""
    return pictures(tmp_path / "raw", 60)


def rejected(made) -> dict[str, str]:
    """Return the rejection reasons by file."""
    rows = made["rejected"].table().to_pylist()
    return {row["source"]: row["reason"] for row in rows}


def job_of(folder, config=VIT, **options) -> TrainJob:
    settings = settings_of(config, **options)
    return samples_job(folder, settings, split(pictures(folder / "raw"), settings))


def test_odd_files_are_converted_or_told_of(raw):
    dark = raw / "dark"
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(grey.astype(np.uint16) * 257).save(dark / "deep.png")
    Image.fromarray(grey).convert("RGB").convert("CMYK").save(dark / "ink.jpg")
    Image.fromarray(grey).convert("P").save(dark / "palette.png")
    frames = [Image.fromarray(grey), Image.fromarray(255 - grey)]
    frames[0].save(dark / "moving.gif", save_all=True, append_images=frames[1:])
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the right
    Image.fromarray(grey).save(dark / "turned.png", exif=turned)
    (dark / "empty.png").write_bytes(b"")
    whole = (dark / "000.png").read_bytes()
    (dark / "cut.png").write_bytes(whole[: len(whole) // 2])
    for kept in (300, 400):
        Image.fromarray(grey).resize((64, 64)).save(dark / f"{kept}.jpg", quality=99)
        cut = (dark / f"{kept}.jpg").read_bytes()[:-kept]
        (dark / f"{kept}.jpg").write_bytes(cut)
    (dark / "text.png").write_text("no image")
    made = split(raw, settings_of())
    told = rejected(made)
    broken = {"dark/300.jpg", "dark/400.jpg", "dark/cut.png"}
    assert told.keys() == {"dark/empty.png", "dark/text.png", *broken}
    assert "truncated or broken" in told["dark/cut.png"]
    assert told["dark/300.jpg"] == told["dark/400.jpg"]
    for name in ("dark/empty.png", "dark/text.png"):
        assert told[name] == "not an image of a known kind"
    found = {}
    for name in ("train", "validation", "test"):
        data = made[name].to_dataset()
        found.update(zip(data["source"], data["inputs"], strict=True))
    assert len(found) == 65
    pixels = {name: np.array(rows)[..., 0] for name, rows in found.items()}
    for name in ("deep.png", "palette.png", "moving.gif"):
        np.testing.assert_array_equal(pixels[f"dark/{name}"], grey)
    np.testing.assert_array_equal(pixels["dark/turned.png"], np.rot90(grey, -1))


def test_folders_without_images_and_images_without_a_folder_are_told_of(tmp_path, raw):
    (raw / "grey").mkdir()
    (raw / "light/notes.txt").write_text("none")
    (raw / "stray.png").write_bytes((raw / "dark/000.png").read_bytes())
    made = split(raw, settings_of())
    assert made["label_names"] == ["dark", "light"]
    assert rejected(made) == {"stray.png": "label is missing"}
    report = made["report"].value()
    assert report["empty_class_folders"] == ["grey"]
    assert report["files_of_other_kinds"] == 1
    assert report["rows_in"] == 61
    (tmp_path / "none").mkdir()
    with pytest.raises(ArraysError, match="has no file of a known kind"):
        split(tmp_path / "none", settings_of())


def sources_of(made):
    names = ("train", "validation", "test")
    return {s for name in names for s in made[name].to_dataset()["source"]}


def test_hidden_folders_are_none_of_classes_and_links_are_followed(tmp_path, raw):
    """A link to a parent folder does not lead to an endless loop."""
    for place in (raw / ".checkpoints", raw / "dark/.thumbnails", tmp_path / "far"):
        place.mkdir()
        for number in range(20):
            grey = np.full((8, 8, 3), 10 * number, np.uint8)
            Image.fromarray(grey).save(place / f"{number}.JPEG")
    (raw / "grey").symlink_to(tmp_path / "far")
    (raw / "dark/loop").symlink_to(raw)
    made = split(raw, settings_of())
    assert made["label_names"] == ["dark", "grey", "light"]
    found = sources_of(made)
    assert len(found) == 80 and "grey/7.JPEG" in found
    assert made["report"].value()["empty_class_folders"] == []


def test_values_without_a_known_range_are_told_of(raw):
    """Images with sixteen bits have a known range, even if Pillow stores them in 32
    bits."""
    dim = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(dim.astype(np.float32) / 64).save(raw / "dark/shares.tif")
    Image.fromarray(dim.astype(np.int32)).save(raw / "dark/whole.tif")
    deep = dim.astype(">u2") * 257
    (raw / "dark/deep.PPM").write_bytes(b"P5 8 8 65535\n" + deep.tobytes())
    (raw / "dark/darkest.ppm").write_bytes(
        b"P5 8 8 65535\n" + dim.astype(">u2").tobytes()
    )
    (raw / "dark/floats.ppm").write_bytes(
        b"Pf\n8 8\n-1.0\n" + (dim.astype("<f4") / 64).tobytes()
    )
    made = split(raw, settings_of())
    told = rejected(made)
    assert told.keys() == {
        f"dark/{n}" for n in ("shares.tif", "whole.tif", "floats.ppm")
    }
    assert all("of no known range: save it with 8" in why for why in told.values())
    decode = Decoder(8, 1)
    np.testing.assert_array_equal(decode(raw / "dark/deep.PPM")[..., 0], dim)
    assert not decode(raw / "dark/darkest.ppm").any()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:Image size")
def test_bytes_that_are_wrong_give_pixels_or_a_reason(form):
    """Pillow's readers raise various errors. Some for TIFF raise a TypeError."""
    generator = np.random.default_rng(1)
    values = generator.integers(0, 255, (24, 24, 3)).astype(np.uint8)
    turned, whole = Image.Exif(), io.BytesIO()
    turned[0x0112] = 6
    Image.fromarray(values).save(whole, form, exif=turned)
    data, decode, bad = np.frombuffer(whole.getvalue(), np.uint8), Decoder(8, 3), 0
    for _ in range(300):
        changed = data.copy()
        places = generator.integers(0, min(300, len(data)), 4)
        changed[places] = generator.integers(0, 256, 4)
        try:
            assert decode(io.BytesIO(changed.tobytes())).shape == (8, 8, 3)
        except BadImage:
            bad += 1
    assert bad


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**VIT, "patch_size": 3}, "8 pixels cannot be divided into patches of 3"),
        ({**CONVNEXT, "patch_size": 8}, "too small for 2 stages after patches of 8"),
    ],
)
def test_a_size_that_a_model_cannot_take_is_refused(tmp_path, config, message):
    with pytest.raises(ModelError, match=message):
        build_model(job_of(tmp_path, config))


def test_a_manifest_names_images_of_its_own_folder_alone(raw):
    lines = [*listed(raw), {"image": "gone.png", "label": "dark"}]
    manifest = raw / "all.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    one, other = split(manifest, settings_of()), split(raw, settings_of())
    tables = [made["train"].to_dataset().data.table for made in (one, other)]
    assert tables[0]["inputs"].equals(tables[1]["inputs"])
    assert rejected(one) == {"gone.png": "no such file"}
    lines.append({"image": "../../etc/passwd", "label": "dark"})
    manifest.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ArraysError, match="leads out of the manifest's folder"):
        split(manifest, settings_of())


def test_a_manifest_in_capitals_and_one_that_names_nothing(raw):
    lines = [f"{row['image']},{row['label']}" for row in listed(raw)]
    files = {row["image"] for row in listed(raw)}
    manifest = raw / "ALL.CSV"
    manifest.write_text("\n".join(["image,label", *lines]))
    assert sources_of(split(manifest, settings_of())) == files
    odd = ["image,label", lines[0], ",dark", "a,b,c"]
    manifest.write_text("\n".join([*odd, *lines[1:]]))
    made = split(manifest, settings_of())
    assert sources_of(made) == files
    assert rejected(made) == {
        "ALL.CSV:1": "image is empty",
        "ALL.CSV:2": "3 fields instead of 2",
    }
    manifest.write_text("file,label\n" + "\n".join(lines))
    with pytest.raises(ArraysError, match=r"images\.image_column is 'image', which is"):
        split(manifest, settings_of())
    for names in ("image,label,label", "image,image,label"):
        manifest.write_text(names + "\n" + "\n".join(f"a,{line}" for line in lines))
        with pytest.raises(ArraysError, match="which is there twice"):
            split(manifest, settings_of())
    manifest.write_text("image,label\n")
    with pytest.raises(ArraysError, match="names no image"):
        split(manifest, settings_of())


def listed(raw):
    return [
        {"image": file.relative_to(raw).as_posix(), "label": file.parent.name}
        for file in sorted(raw.rglob("*.png"))
    ]


def test_names_and_labels_that_cannot_be_read_reject_their_rows(raw):
    lines = listed(raw)
    good, rest = lines[0]["image"], lines[4:]
    odd = [
        {"image": good, "label": {"a": 1}},
        {"image": good, "label": [1]},
        {"image": good, "label": "\ud800"},
        {"image": "x\0.png", "label": "dark"},
        {"image": "x" * 300, "label": "dark"},
        {"image": "\ud800", "label": "other"},
    ]
    manifest = raw / "all.jsonl"
    manifest.write_text("\n".join(map(json.dumps, odd + rest)))
    made = split(manifest, settings_of())
    assert made["label_names"] == ["dark", "light"]
    rows = made["rejected"].table().to_pylist()
    assert [row["reason"].partition(" (")[0] for row in rows[:4]] == [
        "label is neither text nor a number",
        "label is neither text nor a number",
        "label is not valid Unicode",
        "image contains a NUL byte",
    ]
    assert "name too long" in rows[4]["reason"]
    assert rows[5]["reason"] == "image is not valid Unicode"
    assert [row["source"] for row in (rows[0], rows[5])] == [good, "all.jsonl:5"]


def test_texts_of_a_manifest_that_are_not_utf8_reject_their_rows(raw):
    columns = {
        name: pa.array([row[name].encode() for row in listed(raw)] + [b"a\xe9"])
        for name in ("image", "label")
    }
    columns["label"] = pa.array([b"\xe9", *columns["label"].to_pylist()[1:]])
    arrays = {
        name: pa.StringArray.from_buffers(61, *column.buffers()[1:])
        for name, column in columns.items()
    }
    pq.write_table(pa.table(arrays), raw / "all.parquet")
    made = split(raw / "all.parquet", settings_of())
    reasons = [row["reason"] for row in made["rejected"].table().to_pylist()]
    assert reasons == ["label is not valid UTF-8", "image is not valid UTF-8"]


def test_links_in_the_folder_of_a_manifest_are_followed(tmp_path):
    pictures(tmp_path / "far", 60)
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "near").symlink_to(tmp_path / "far")
    lines = [f"near/{row['image']};{row['label']}" for row in listed(tmp_path / "far")]
    (raw / "all.csv").write_text("\n".join(["image;label", *lines]))
    assert len(sources_of(split(raw / "all.csv", settings_of()))) == 60


def test_folders_of_splits_are_not_taken_for_classes(tmp_path):
    for name in ("train", "Val"):
        pictures(tmp_path / "raw" / name, 20)
    with pytest.raises(ArraysError, match=r"\['Val', 'train'\], which are splits"):
        split(tmp_path / "raw", settings_of())


@pytest.mark.parametrize("cut", [sampled, gathered])
def test_a_crop_is_a_part_scaled_up_and_mirrored(cut):
    def crop(planes, crops):
        return cut(planes.permute(0, 2, 3, 1), crops).permute(0, 3, 1, 2)

    torch.manual_seed(0)
    pixels = torch.rand(2, 3, 8, 8)
    whole = torch.tensor([[0.0, 0, 1, 1, 0], [0.0, 0, 1, 1, 1]])
    found = crop(pixels, whole)
    torch.testing.assert_close(found[0], pixels[0])
    torch.testing.assert_close(found[1], pixels[1].flip(2))
    part = torch.tensor([[0.25, 0.5, 0.5, 0.5, 0.0]])
    smooth = nn.functional.interpolate(
        pixels[:1, :, 4:8, 2:6], scale_factor=2.0, mode="bilinear"
    )
    inner = slice(1, -1)  # the edge of a crop depends on the pixels next to it
    torch.testing.assert_close(
        crop(pixels[:1], part)[..., inner, inner], smooth[..., inner, inner]
    )


def test_crops_come_from_seed_epoch_and_row(tmp_path):
    job = job_of(tmp_path, crop_area=0.4)

    def crops(ids, epoch):
        found = job.task.targets(job.train, np.array(ids), epoch, pools_last=False)
        return found.fields["crops"]

    many = crops(np.arange(90) % len(job.train), 1)
    left, top, width, height, mirrored = many.T
    assert ((left >= 0) & (left + width <= 1.0001)).all()
    assert ((top >= 0) & (top + height <= 1.0001)).all()
    assert (width * height >= 0.29).all() and (width * height <= 1).all()
    assert 0.2 < mirrored.mean() < 0.8
    np.testing.assert_array_equal(crops([5, 7, 2], 1)[1], crops([7], 1)[0])
    assert not np.array_equal(crops([7], 1), crops([7], 2))
    drawn = crops(np.arange(9), 1)
    job.task.seed += 1
    assert not (crops(np.arange(9), 1) == drawn).all(1).any()


def test_transforms_above_ten_milliseconds_are_named():
    decode = Decoder(8, 3)
    decode.decoded = 4
    decode.seconds.update(decode=0.2, convert=0.039, resize=0.0412)
    assert decode.slow_transforms_ms == {"decode": 50.0, "resize": 10.3}


def plain_losses(job: TrainJob, steps: int) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm by step of transformers' model, with the
    initial weights."""
    torch.manual_seed(job.settings.runtime.seed)
    config = build_model(job).config
    torch.manual_seed(job.settings.runtime.seed)
    model = AutoModelForImageClassification.from_config(config)
    pixels = np.stack(job.train.views(np.arange(len(job.train)))).astype(np.float64)
    mean, deviation = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    images = torch.tensor((pixels - mean) / deviation).float().permute(0, 3, 1, 2)

    def logits_of(rows, epoch):
        made = job.task.targets(job.train, rows, epoch, pools_last=False)
        turned = torch.tensor(made.fields["crops"][:, 4]).bool()
        chosen = images[rows]
        chosen[turned] = chosen[turned].flip(3)
        return model(pixel_values=chosen).logits

    return step_losses(job, model, steps, logits_of)


@pytest.mark.parametrize("config", [VIT, CONVNEXT], ids=["vit", "convnext"])
@pytest.mark.parametrize("budget", ["auto", 5])
def test_loss_and_gradient_are_those_of_plain_pytorch(tmp_path, config, budget):
    job = job_of(
        tmp_path, config, token_budget=budget, max_steps=3, learning_rate=1e-12
    )
    found = [(p.loss, p.grad_norm) for p in run_job(job).history]
    np.testing.assert_allclose(found, plain_losses(job, 3), rtol=1e-3)


def test_batchnorm_takes_a_step_at_once_or_is_refused(tmp_path):
    small = job_of(tmp_path / "a", RESNET, token_budget=5)
    with pytest.raises(SettingsError, match="one micro-batch, of 16 samples"):
        run_job(small)
    job = job_of(tmp_path / "b", RESNET, max_steps=3, learning_rate=1e-12, flip=0.0)
    result = run_job(job)
    assert result.report.token_budget == 16
    [(first, _)] = plain_losses(job, 1)
    np.testing.assert_allclose(result.history[0].loss, first, rtol=1e-3)


def test_operations_are_those_of_each_place(tmp_path):
    model = build_model(job_of(tmp_path))
    patches, width, inner = 4, 16, 32
    each = 4 * width**2 + 2 * width * inner
    places = patches + 1
    attention = 2 * places**2 * width
    wanted = patches * 48 * width + 2 * (places * each + attention) + width * 2
    assert ModelFlops.of(model).body == 6 * wanted


def test_a_checkpoint_keeps_its_statistics_and_takes_its_own_size(tmp_path):
    job = job_of(tmp_path, max_steps=1)
    folder = run_job(job).last_model_folder
    again = job.settings.model.model_copy(update={"name_or_path": str(folder)})
    facts = job.test.facts
    config = build(again, job.task, None, 1, facts=facts).config
    assert config.image_mean == pytest.approx(job.train.facts.mean)
    facts.shape = [16, 16, 3]
    with pytest.raises(ModelError, match="its image_size is 8, but the rows have 16"):
        build(again, job.task, None, 1, facts=facts)


def test_a_checkpoint_from_elsewhere_standardises_as_its_processor_does(tmp_path):
    """The image size is also stored, because configs of ResNets from the Hub lack
    it."""
    job = job_of(tmp_path, RESNET, max_steps=1)
    folder, plain = tmp_path / "plain", AutoConfig.for_model(**RESNET)
    AutoModelForImageClassification.from_config(plain).save_pretrained(folder)
    mean, deviation = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
    processor = BitImageProcessorPil(image_mean=mean, image_std=deviation)
    processor.save_pretrained(folder)
    chosen = job.settings.model.model_copy(update={"name_or_path": str(folder)})
    config = build(chosen, job.task, None, 1, facts=job.train.facts).config
    assert config.image_mean == pytest.approx([255 * value for value in mean])
    assert config.image_std == pytest.approx([255 * value for value in deviation])
    assert config.image_size == 8
    (folder / "preprocessor_config.json").unlink()
    config = build(chosen, job.task, None, 1, facts=job.train.facts).config
    assert config.image_mean == pytest.approx(job.train.facts.mean)


def test_the_pipeline_of_transformers_answers_as_the_model_does(tmp_path):
    """This uses the files in the saved model's folder."""
    folder = run_job(job_of(tmp_path, CONVNEXT, max_steps=2)).last_model_folder
    own = pipeline("image-classification", model=str(folder))
    model, decode = load_pretrained(folder).eval(), Decoder(8, 3)
    generator = np.random.default_rng(6)
    for shape in ((8, 8), (8, 20), (40, 40)):
        values = generator.integers(0, 255, (*shape, 3)).astype(np.uint8)
        Image.fromarray(values).save(tmp_path / "photo.png")
        batch = {"inputs": torch.tensor(decode(tmp_path / "photo.png"))[None]}
        with torch.no_grad():
            given = family_of(model.config).inputs(model.config, batch, 1)
            expected = model(**given).logits.softmax(-1)[0]
        found = {a["label"]: a["score"] for a in own(str(tmp_path / "photo.png"))}
        scores = [found[model.config.id2label[n]] for n in range(2)]
        assert scores == pytest.approx(expected.tolist(), abs=1e-5)


def test_grey_images_have_no_processor(tmp_path):
    """Pipelines of transformers would convert the images to three channels."""
    folder = run_job(job_of(tmp_path, CONVNEXT, max_steps=1, channels=1))
    assert not (folder.last_model_folder / "preprocessor_config.json").exists()


def test_batchnorm_over_ranks_of_a_cpu_is_refused(tmp_path):
    job = job_of(tmp_path, RESNET)
    ranks = Ranks(world_size=2, local_world_size=2)
    runtime = replace(set_up(job.settings.runtime), ranks=ranks)
    with pytest.raises(SettingsError, match="statistics ranks share only on GPUs"):
        resolve(job, runtime, build_model(job).config)


@pytest.mark.parametrize("config", [VIT, RESNET], ids=["vit", "resnet"])
def test_a_checkpoint_starts_a_training_of_other_classes(tmp_path, config):
    """The body is kept, but the head is new."""
    job = job_of(tmp_path / "first", config, max_steps=2)
    folder = run_job(job).last_model_folder
    raw = pictures(tmp_path / "second/raw")
    grey = np.random.default_rng(4).integers(100, 160, (40, 8, 8, 3))
    (raw / "grey").mkdir()
    for number, pixels in enumerate(grey.astype(np.uint8)):
        Image.fromarray(pixels).save(raw / "grey" / f"{number}.png")
    options = {"max_steps": 1, "learning_rate": 1e-12}
    again = job_of(tmp_path / "second", config, **options)
    again = changed(again, model={"name_or_path": str(folder)})
    result = run_job(again)
    assert again.label_names == ("dark", "grey", "light")
    ours, theirs = (
        load_file(f / "model.safetensors") for f in (result.last_model_folder, folder)
    )
    body = [n for n in theirs if not n.startswith("classifier") and "running" not in n]
    body = [n for n in body if "num_batches" not in n]
    assert len(body) > 5
    for name in body:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    (head,) = [n for n in ours if n.startswith("classifier") and n.endswith("weight")]
    assert (len(ours[head]), len(theirs[head])) == (3, 2)


def test_rows_that_hold_files_train_as_rows_of_pixels_do(tmp_path):
    """Files are decoded in threads and by workers. The smallest files are kept
    unchanged."""
    options = {"max_steps": 4, "crop_area": 0.5}
    pixels = job_of(tmp_path / "pixels", CONVNEXT, **options)
    options |= {"keep": "files"}
    files = job_of(tmp_path / "files", CONVNEXT, **options)
    loader = {"num_workers": 2}
    by_workers = job_of(tmp_path / "workers", CONVNEXT, loader=loader, **options)
    [first] = files.train.table.slice(0, 1).to_pylist()
    assert first["encoded"] == (tmp_path / "files/raw" / first["source"]).read_bytes()
    assert files.train.facts.as_dict() == pixels.train.facts.as_dict()
    ids = np.array([5, 0, 5, 7])
    for ours, theirs in zip(
        files.train.views(ids), pixels.train.views(ids), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    found = [curve(run_job(job)) for job in (pixels, files, by_workers)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("mode", "pixels", "size", "channels", "warns"),
    [
        ("RGB", 40, 40, 1, True),
        ("L", 40, 8, 1, True),
        ("RGB", 40, 40, 3, False),
        ("L", 8, 8, 1, False),
        ("RGB", 500, 224, 3, False),
    ],
)
def test_lost_colours_and_pixels_are_reported(
    tmp_path, mode, pixels, size, channels, warns
):
    Image.new(mode, (pixels, pixels)).save(tmp_path / "a.png")
    decode = Decoder(size, channels)
    decode(tmp_path / "a.png")
    assert bool(decode.lost_detail()) == warns


def test_more_pixels_than_allowed_are_refused(monkeypatch, tmp_path):
    Image.new("RGB", (8, 9)).save(tmp_path / "large.png")
    monkeypatch.setattr(decoding, "MOST_PIXELS", 72)
    assert Decoder(4, 3)(tmp_path / "large.png").shape == (4, 4, 3)
    monkeypatch.setattr(decoding, "MOST_PIXELS", 71)
    with pytest.raises(BadImage, match="more pixels than an image should have"):
        Decoder(4, 3)(tmp_path / "large.png")

"""Rows with images, video or audio, which a model that is trained on text alone would not see."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from podium.errors import DataError
from podium.rollout.tasks import DataConfig, encode_pairs, encode_prompts, load_examples
from podium.rollout.tasks.media import find_media, find_sign
from tests.unit.rollout.tasks.test_encode import CHATML, byte_tokenizer, notes_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
PAIR = {"prompt": "how many dots?", "answer": "3"}


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"images": ["a.png"]}, "images"),
        ({"image": "a.png"}, "image"),
        ({"Image": {"bytes": None, "path": "a.png"}}, "Image"),
        ({"decoded_image": {"bytes": "aGk=", "path": None}}, "decoded_image"),
        ({"image_1": None, "image_2": {"path": "b.png", "bytes": None}}, "image_2"),
        ({"image_path": "dots/1.png"}, "image_path"),
        ({"image_urls": ["https://dots.test/1"]}, "image_urls"),
        ({"pixel_values": [[0.1, 0.2]]}, "pixel_values"),
        ({"video": "a.mp4"}, "video"),
        ({"audios": [{"array": [0.1], "sampling_rate": 16000}]}, "audios"),
        ({"sample": {"array": [0.1], "sampling_rate": 16000}}, "sample"),
        ({"figure": PNG}, "figure"),
        ({"figures": [{"bytes": PNG, "path": "1.png"}]}, "figures"),
        ({"figure": "data:image/png;base64,iVBORw0KGgo="}, "figure"),
        ({"extra_info": {"index": 1, "images": ["a.png"]}}, "extra_info.images"),
        ({"prompt": [{"role": "user", "content": "dots?", "images": ["a.png"]}]}, "prompt.images"),
    ],
)
def test_a_medium_is_told_by_its_column_or_its_value(columns: dict[str, Any], name: str) -> None:
    assert find_media({**PAIR, **columns}) == name


@pytest.mark.parametrize(
    "columns",
    [
        {"image": None, "images": [], "video": "", "audio": {}, "image_2": {"bytes": None, "path": None}},
        {"has_image": True, "num_images": 3, "image_caption": "a cat", "docker_image": "python:3.11"},
        {"tools": [{"name": "show", "parameters": {"properties": {"image": {"type": "string"}}}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"image": "a.png"}}}]}]},
        {"file": "logo.png", "code": b"def f(): ...", "scores": [1, 2, 3], "path": "a.png", "imagery": "rich"},
    ],
)
def test_what_only_speaks_of_media_is_text(columns: dict[str, Any]) -> None:
    assert find_media({**PAIR, **columns}) is None


@pytest.mark.parametrize(
    "text",
    [
        "<image>how many?",
        "how many?\n<image>",
        "compare <image> with <image>.",
        "<|image_pad|> how many?",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<start_of_image> how many?",
        "<image_soft_token>",
        "<|image_1|>\nhow many?",
        "see <image 1> and count",
        "<video>\nwhat happens?",
        "<|AUDIO|> what is said?",
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        "[IMG] how many?",
    ],
)
def test_a_sign_that_stands_for_a_medium_is_found(text: str) -> None:
    assert find_sign(["how many?", text]) is not None


@pytest.mark.parametrize(
    "text",
    [
        "what does `<image>` mean?",
        'the word "<image>" is a sign',
        "how does the <video> tag work?",
        "<video controls><source src='a.mp4'></video>",
        "<picture>\n<source>\n</picture>",
        "```html\n<audio>\n```",
        "x <image_width> y < image > z",
        "let f: <imagine> and |image| = 3",
    ],
)
def test_a_text_may_speak_of_such_a_sign_unless_the_tokenizer_reads_it_as_one(text: str) -> None:
    assert find_sign([text]) is None
    assert find_sign(["what does `<image>` mean?"], {"<image>"}) == "<image>"


@pytest.mark.parametrize("encode", [encode_prompts, encode_pairs])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**PAIR, "images": ["a.png"]}, "column 'images' holds an image, video or audio"),
        (
            {**PAIR, "prompt": "<image>\nhow many?"},
            r"the text has '<image>', which stands for an image.*, or put '<image>' in quotes",
        ),
        (
            {"messages": [{"role": "user", "content": "<video> so?"}, {"role": "assistant", "content": "3"}]},
            "'<video>'",
        ),
        (
            {**PAIR, "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "dots?"}]}]},
            "message 1 of column 'prompt' has a part of the type 'image'",
        ),
    ],
)
def test_a_row_with_a_medium_is_refused_with_its_place(tmp_path: Path, encode: Any, row: Any, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (PAIR, row)))
    config = DataConfig(train=str(path), holdout=0)
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: .*{said}"):
        encode(load_examples(config.train, config), byte_tokenizer(CHATML), config)


def test_pictures_of_a_dataset_are_found_without_decoding_them(tmp_path: Path) -> None:
    """The features say that a column holds images, and ``datasets`` would decode them by a library that is not here."""
    import datasets

    features = datasets.Features({**dict.fromkeys(PAIR, datasets.Value("string")), "dots": datasets.Image()})
    rows = {"prompt": ["how many dots?"], "answer": ["3"], "dots": [{"bytes": PNG, "path": None}]}
    datasets.Dataset.from_dict(rows, features).save_to_disk(tmp_path / "saved")
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
    for spec, place in ((tmp_path / "saved", r"saved \[train\], row 1"), (tmp_path / "rows.parquet", "row 1")):
        config = DataConfig(train=str(spec), holdout=0)
        with pytest.raises(DataError, match=f"{place}: column 'dots' holds an image"):
            encode_prompts(load_examples(config.train, config), byte_tokenizer(), config)


def test_an_address_of_a_medium_beside_a_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**PAIR, "image_url": "https://dots.test/1.png"}) + "\n")
    config = DataConfig(train=str(path), holdout=0)
    assert notes_of(lambda: encode_prompts(load_examples(config.train, config), byte_tokenizer(), config)) == [
        f"{path}: 1 row has an address in 'image_url', and the model does not see what is there"
    ]


def test_a_column_that_is_read_as_text_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"image": "a red dot", "answer": "3"}) + "\n")
    config = DataConfig(train=str(path), holdout=0, prompt_column="image")
    assert encode_prompts(load_examples(config.train, config), byte_tokenizer(), config).kept == [0]

"""Classifiers that read the state at the end token, and texts that contain this
token."""

from dataclasses import replace

import pandas as pd
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForSequenceClassification as Bart,
    PreTrainedTokenizerFast,
)

from flatout.engine.launch.launch import run_job
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.predict.predicting import predict
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from tests.engine.runs import make_job
from tests.make import exact_settings

TEXTS = ["a b c", "b </s> a", "c a", "", "a </s> </s>", "b b b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BART with its tokenizer."""
    path = tmp_path_factory.mktemp("bart")
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c"]
    words = models.WordLevel({p: n for n, p in enumerate(pieces)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", **names
    ).save_pretrained(path)
    torch.manual_seed(5)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = BartConfig(
        vocab_size=7,
        max_position_embeddings=32,
        id2label={0: "x", 1: "y"},
        **sizes,
    )
    Bart(config).save_pretrained(path)
    return path


def settings_of(folder):
    return exact_settings(
        model={"name_or_path": str(folder)},
        tokenize={"max_length": 24},
        predict={"text_column": "text", "window_rows": 4},
    )


def test_a_text_that_holds_the_end_has_a_reason_and_the_others_an_answer(folder):
    theirs = AutoTokenizer.from_pretrained(folder)
    model = Bart.from_pretrained(folder).eval()
    both = theirs(TEXTS[:2], padding=True, return_tensors="pt")
    with pytest.raises(ValueError, match="same number of <eos>"):
        model(**{name: both[name] for name in ("input_ids", "attention_mask")})
    found = predict(
        load_pretrained(folder).eval(),
        TokenizerFile(folder),
        pd.DataFrame({"text": TEXTS}),
        settings_of(folder),
    )
    rows = pa.Table.from_batches(found.batches(), found.schema).to_pylist()
    assert [row["row"] for row in rows] == list(range(len(TEXTS)))
    assert rows[3]["reason"] == "text is empty"
    for row, text in zip(rows, TEXTS, strict=True):
        if "</s>" in text:
            assert "end tokens (number 2) instead of 1" in row["reason"]
            assert row["label"] is None
        elif text:
            ids = torch.tensor([theirs(text)["input_ids"]])
            with torch.no_grad():
                shares = model(input_ids=ids).logits.softmax(-1)[0]
            assert row["probability_x"] == pytest.approx(shares[0].item(), rel=1e-4)
            assert row["reason"] is None


def test_a_training_is_refused_with_the_row(tmp_path, folder):
    theirs = AutoTokenizer.from_pretrained(folder)

    def rows_of(texts):
        ids = [theirs(text)["input_ids"] for text in texts]
        labels = [n % 2 for n in range(len(texts))]
        return TokenRows(pa.table({"input_ids": ids, "labels": labels}))

    job, good = make_job(tmp_path), rows_of(["a", "b c", "c"])
    settings = job.settings.model_copy(update={"model": settings_of(folder).model})
    splits = {"train": rows_of(TEXTS), "validation": good, "test": good}
    known = {"label_names": ("x", "y"), "vocabulary": Vocabulary(7, 1)}
    job = replace(job, settings=settings, **known, **splits)
    with pytest.raises(ModelError, match=r"2 rows of train_tokens .* is row 1: 2 end"):
        run_job(job)

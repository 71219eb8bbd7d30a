"""A folder with a model that has its own code: an embedding, a mean and a matrix. The
names of its sizes are unique."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=100, width=8, **options):
        self.vocab_size, self.width = vocab_size, width
        super().__init__(**options)


class OwnForSequenceClassification(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "body"

    def __init__(self, config):
        super().__init__(config)
        self.body = torch.nn.Embedding(config.vocab_size, config.width)
        self.classifier = torch.nn.Linear(config.width, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask):
        states = self.body(input_ids) * attention_mask.unsqueeze(-1)
        means = states.sum(1) / attention_mask.sum(1, keepdim=True)
        return SequenceClassifierOutput(logits=self.classifier(means))
"""
CONFIG = {
    "model_type": "own",
    "architectures": ["OwnForSequenceClassification"],
    "auto_map": {
        "AutoConfig": "own_model.OwnConfig",
        "AutoModelForSequenceClassification": "own_model.OwnForSequenceClassification",
    },
    "num_labels": 3,
}


def write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "own_model.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "body.weight": (100, 8),
        "classifier.weight": (3, 8),
        "classifier.bias": (3,),
    }
    weights = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder

"""Names that flatout's parameters have in other programs, such as the Trainer of
transformers and Lightning, and names that they had in earlier versions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

RENAMED = {"train.strategy": "train.batching"}
"""Maps old parameter names, which still work for one release, to new names in the same
group."""

REMOVED: dict[str, str] = {
    # model and runtime
    "runtime.attention=flash4": "use runtime.attention=auto, which uses "
    "FlashAttention 4 if flash-attn-4 is installed",
    "model.config.preset": "use model.config.num_hidden_layers and "
    "model.config.hidden_size: middle was 6 and 64, large 12 and 128",
    # split and tokenize
    "tokenize.num_processes": "the tokenizer's own threads use all cores; "
    "runtime.environment: {RAYON_NUM_THREADS: 1} limits them to one",
    # train
    "train.error_analysis_every": "remove it: the pipeline evaluate writes "
    "wrong_predictions",
    "train.layer_decay": "use train.freeze for the lowest layers, or a lower "
    "train.learning_rate",
    "train.optimizer=muon": "use train.optimizer=adamw, or the dotted path of a "
    "custom optimizer",
    "train.compile=late": "use train.compile=auto, or true for a long training",
    # benchmark
    "benchmark.mode=peers": "run python -m benchmarks.encoders in a checkout",
    "benchmark.mode=headline": "use benchmark.mode=ladder, which ends with the ratio "
    "of all kept optimisations to conf/slow",
    "benchmark.contenders": "remove it: the benchmark no longer runs the Trainer",
    "benchmark.mode=journey": "run python -m benchmarks.commands in a checkout",
    "benchmark.slow_rows_ms": "benchmark.profile=true lists the operators that make a "
    "batch",
    "benchmark.mode=loader": "use benchmark.mode=tune, which also measures the loader",
    "benchmark.mode=scaling": "use benchmark.mode=tune, which compares with one device",
    "benchmark.deadline_hours": "use train.deadline_hours",
    "benchmark.max_minutes": "press Ctrl-C, or run the command with timeout; the same "
    "command continues with the remaining trials",
    # sweep, tracking and other groups
    "tracking.keep_models": "every version stays in MLflow until you delete it there",
    "guard.baseline": "remove it; to accept a slower run, remove the line of the "
    "faster run from data/08_reporting/runs.jsonl",
    "guard.healthy_high_pct": "remove it: faster runs are healthy",
    "guard.max_differences": "remove it: guard.json contains all differences",
    "guard.store_limit_s": "remove it: the guard reads data/08_reporting/runs.jsonl",
}
"""Replacements for parameters (`train.example`) and for values (`train.example=value`)
of earlier versions. docs/migration.md lists them too."""

_NAMES = {
    "train": "training trainer training_args training_arguments",
    "tokenize": "tokenizer tokenization",
    "data_dir": "out_dir output_dir",
    "model.name_or_path": "base_model checkpoint_name model_id model_name "
    "model_name_or_path pretrained_model pretrained_model_name_or_path",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.rank": "lora_r lora_rank",
    "model.lora.targets": "lora_target_modules target_modules",
    "model.task": "problem_type task_name task_type",
    "model.mask_probability": "mlm_probability",
    "runtime.attention": "attn_implementation flash_attention use_flash_attention_2",
    "runtime.deterministic": "cudnn_deterministic full_determinism",
    "runtime.precision": "amp bf16 dtype fp16 mixed_precision torch_dtype use_amp",
    "runtime.seed": "manual_seed random_seed",
    "runtime.tf32": "allow_tf32 float32_matmul_precision",
    "runtime.threads": "num_threads omp_num_threads",
    "split.fractions": "test_size train_size val_size validation_split",
    "split.seed": "data_seed split_seed",
    "tokenize.max_length": "block_size max_len max_seq_len max_seq_length "
    "model_max_length seq_length",
    "train.adam_beta2": "adam_betas betas",
    "train.adam_epsilon": "eps epsilon",
    "train.batching": "group_by_length packing pad_to_max_length padding",
    "train.checkpoint.every_steps": "save_every save_interval save_steps save_strategy",
    "train.checkpoint.keep": "save_total_limit",
    "train.compile": "compile_model torch_compile",
    "train.distributed.bucket_mib": "bucket_cap_mb ddp_bucket_cap_mb",
    "train.distributed.machine_rank": "node_rank",
    "train.distributed.num_machines": "nnodes num_nodes",
    "train.distributed.num_processes": "device devices gpus nproc_per_node num_gpus",
    "train.distributed.rendezvous_endpoint": "master_addr master_port",
    "train.distributed.strategy": "fsdp sharding_strategy",
    "train.early_stopping_patience": "early_stopping patience",
    "train.empty_cache_every": "torch_empty_cache_steps",
    "train.epochs": "max_epochs n_epochs num_epochs num_train_epochs",
    "train.evaluate_every": "eval_steps eval_strategy evaluation_strategy "
    "val_check_interval",
    "train.freeze": "freeze_layers frozen_layers",
    "train.global_batch_size": "accumulate_grad_batches batch_size "
    "gradient_accumulation_steps per_device_train_batch_size train_batch_size",
    "train.gradient_checkpointing": "activation_checkpointing",
    "train.label_smoothing": "label_smoothing_factor",
    "train.layer_decay": "layer_lr_decay layerwise_lr_decay llrd",
    "train.learning_rate": "base_lr lr max_lr",
    "train.loader.num_workers": "dataloader_num_workers workers",
    "train.loader.persistent_workers": "dataloader_persistent_workers",
    "train.loader.pin_memory": "dataloader_pin_memory",
    "train.loader.prefetch_factor": "dataloader_prefetch_factor",
    "train.log_every": "log_every_n_steps log_interval log_steps logging_steps",
    "train.max_grad_norm": "clip_grad_norm clipping grad_clip gradient_clip_val "
    "gradient_clipping",
    "train.metric": "eval_metric metric_for_best_model monitor",
    "train.min_learning_rate_share": "min_lr min_lr_rate min_lr_ratio",
    "train.on_oom": "auto_find_batch_size",
    "train.optimizer": "optim",
    "train.resume": "resume_from resume_from_checkpoint",
    "train.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "train.token_budget": "max_tokens micro_batch_size per_device_eval_batch_size",
    "train.warmup_fraction": "warmup_ratio warmup_steps",
    "train.weight_decay": "wd",
}
HERE = {name: path for path, names in _NAMES.items() for name in names.split()}
"""Maps names in other programs to flatout's parameters, including REMOVED ones."""


def with_new_names(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return `parameters` with RENAMED applied, and log a warning for each old name. If
    both names are given, the old name is kept and later rejected as unknown."""
    found = dict(parameters)
    for before, now in RENAMED.items():
        (group, old), new = before.split("."), now.rpartition(".")[2]
        values = found.get(group)
        if isinstance(values, Mapping) and old in values and new not in values:
            found[group] = {new if k == old else k: v for k, v in values.items()}
            logger.warning("parameter %s is now called %s: rename it", before, now)
    return found

"""Language modelling, the task of most trainings."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lcjax import config as config_lib
from lcjax.attention.head_gates import HEAD_GATE, clipped
from lcjax.checkpoints import save_hf
from lcjax.checkpoints.adapters import save_peft
from lcjax.checkpoints.build import build, check_source
from lcjax.checkpoints.hf_config import trained_for
from lcjax.checkpoints.hf_names import fuses_adapters
from lcjax.checkpoints.hf_save import HF_FOLDER, check_exportable
from lcjax.checkpoints.landmark_token import with_landmark
from lcjax.checkpoints.load import kernel_reader, load_config
from lcjax.checkpoints.run_folder import MODEL_CONFIG, BaseModel, has_kernels
from lcjax.checkpoints.tokenizer import Tokenizer
from lcjax.data import Loader, check_outside_data, check_sources, make_loader, scan
from lcjax.errors import InputError
from lcjax.files import update_sums
from lcjax.models import Decoder, ModelConfig
from lcjax.models import lora as lora_lib
from lcjax.models.layers import is_of_pattern
from lcjax.parallel import distributed
from lcjax.parallel.device_memory import to_host
from lcjax.parallel.digest import weights_digest
from lcjax.parallel.sharding import process_rows
from lcjax.rope.positions import PlainPositions
from lcjax.storage import to_path
from lcjax.training import batches, estimate
from lcjax.training import folder as folder_lib
from lcjax.training.objective import Objective, gate_distillation, language_model
from lcjax.training.optim import to_float32
from lcjax.training.state import new_adapters, new_params
from lcjax.training.tracking import announce
from lcjax.training.train_config import TrainConfig, trainable
from lcjax.training.training_task import Task
from lcjax.tree import flatten, nest, split, union


def make_task(config: TrainConfig, mesh: jax.sharding.Mesh) -> Task:
    """Returns the task of a config; nothing is loaded yet."""
    if config.retriever is not None:
        return config.retriever.make_task(config, mesh)
    kind = LanguageModelTask if config.train.head_gates is None else HeadGateTask
    return kind(config, mesh)


class LanguageModelTask(Task):
    """Next-token prediction by the model of `config.model`, on the rows of `config.data`."""

    export_format = HF_FOLDER
    model: ModelConfig  # with adapters; param_dtype is the dtype of exported weights
    tokenizer: Tokenizer
    _memory: list[str] | None = None  # lines of the summary; None: its model is not known yet
    _has_new_pattern: bool = False  # whether a pattern has parameters that the checkpoint lacks

    def check(self) -> None:
        self.check_inputs()
        estimate.check_rules(self.config)
        model = estimate.planned_model(self.config)
        if model is not None:
            self._memory = estimate.of_run(self.config, model, self.mesh)

    def check_inputs(self) -> None:
        """Checks the model and the text, but not the rules that select trained parameters."""
        config = self.config
        batches.check_rows(config, self.mesh.shape)
        check_source(config.model)
        check_sources(config.data)
        check_outside_data("run.folder", to_path(config.run.folder), config.data)
        if config.data.scan:
            distributed.from_main(lambda: scan(config.data))
        batches.check_text(config)

    def load(self) -> tuple[dict, dict]:
        trained, frozen = split_trained(self.config, self.load_model())
        if self._has_new_tokens:
            self._check_new_tokens(frozen)
        if self._has_new_pattern:
            self._check_new_pattern(frozen)
        if self.config.train.export:
            check_exportable(self._saved_model())
        if self._memory is None:
            self._memory = estimate.of_run(self.config, self.model, self.mesh)
        return trained, frozen

    def load_model(self) -> dict:
        """Returns all parameters, with adapters; sets `model`, `tokenizer` and `dtype`."""
        config, mesh = self.config, self.mesh
        announce(f"loading {config.model.path or config.model.preset}")
        is_host = config.train.offload == "parameters"
        model, params, tokenizer = build(config.model, mesh, host=is_host)
        batches.check_context(config, model.config)
        params, self.model, self.tokenizer = with_landmark(params, model.config, tokenizer, mesh)
        batches.check_mask(config, self.model, self.tokenizer)
        self._has_new_tokens = self.model.vocab_size > model.config.vocab_size
        self._has_new_pattern = self._adds_parameters()
        self.dtype = self.model.dtype
        if config.train.lora is not None:
            self.model = self.model.replace(lora=config.train.lora)
            params = union(
                params, new_adapters(Decoder(self.model).init, mesh, seed=config.train.seed)
            )
        return params

    def _adds_parameters(self) -> bool:
        """Returns whether a pattern has parameters that the checkpoint lacks."""
        kinds = {type(pattern) for pattern in self.model.patterns if pattern.parameters}
        if self.config.model.path is None or not kinds:
            return bool(kinds)
        return not kinds <= set(map(type, load_config(self.config.model.path).patterns))

    def _check_new_pattern(self, frozen: dict) -> None:
        if paths := [path for path in flatten(frozen) if is_of_pattern(path)]:
            raise InputError(
                f"train.trainable={list(self.config.train.rules())} leaves new parameters of the"
                f" pattern untrained ({paths[0]}); add the rule pattern, or train them first"
            )

    def _check_new_tokens(self, frozen: dict) -> None:
        paths = [path for path in flatten(frozen) if path.startswith(("embed/", "head/"))]
        if paths:
            rules = ["head" if path.startswith("head/") else "embeddings" for path in paths]
            raise InputError(
                f"train.trainable={list(self.config.train.rules())} leaves the rows of [PAD] and"
                f" <landmark> untrained ({paths[0]}); add the rule"
                f" {' and '.join(dict.fromkeys(rules))}, or train all"
            )

    def open_loader(self, split: str, *, documents: bool = False) -> Loader:
        """See `Task.open_loader`, and `make_loader` for `documents`."""
        if split == "train":
            path = self.config.data.path
            announce(f"opening the text of data.{f'path={path}' if path else 'sources'}")
        size = self.config.train.batch_size
        return make_loader(
            self.config.data,
            self.tokenizer,
            size,
            rows=process_rows(self.mesh, size),
            split=split,
            inserted=self._model_in(split).pattern.inserted_tokens,
            documents=documents,
        )

    def objective(self, split: str) -> Objective:
        train = self.config.train
        is_train = split == "train"
        return language_model(
            self._model_in(split),
            train.positions if is_train else PlainPositions(),
            chunk=train.loss_chunk,
            mesh=self.mesh,
            distill=train.distill if is_train else None,
            terms=is_train,
        )

    def _model_in(self, split: str) -> ModelConfig:
        return self.model if split == "train" else self.model.for_inference()

    def base(self, trained: dict, frozen: dict) -> BaseModel:
        section = self.config.model
        return BaseModel(
            path=section.path,
            param_dtype=section.param_dtype,
            seed=section.seed,
            trained=tuple(flatten(trained)),
            average=self.config.train.ema is not None,
            frozen=weights_digest(frozen),
            base=section.base,
            memory=section.memory and section.memory.to_dict(),
            encoder_layers=section.encoder_layers,
        )

    def _saved_model(self) -> ModelConfig:
        return self.model

    def write_config(self, folder: Path) -> None:
        model = trained_for(self._saved_model(), self.config.data.length)
        config_lib.dump(model, folder / MODEL_CONFIG)
        (folder / folder_lib.TOKENIZER).mkdir(exist_ok=True)
        self.tokenizer.save(folder / folder_lib.TOKENIZER)
        files = [folder / MODEL_CONFIG, *(folder / folder_lib.TOKENIZER).iterdir()]
        update_sums(folder, sorted(files))

    def export(self, folder: Path, trained: dict, frozen: dict) -> None:
        """Writes the merged model, and the adapters alone if they are the only change to the base.

        Adapters of models with fused projections cannot be written in peft's format. Adapters are
        merged one layer at a time while writing, so no second model is in memory. All processes
        must call this: each holds a part of the weights, and the first one writes.
        """
        train, section = self.config.train, self.config.model
        options = {"overwrite": True, "checksums": train.checksums}
        # A model with a new memory or pattern, or made into an encoder, is more than its base.
        is_base = section.memory is section.encoder_layers is None and not self._has_new_pattern
        model = trained_for(self.model, self.config.data.length)
        is_adapted = is_base and all(map(lora_lib.is_adapter, flatten(trained)))
        if is_adapted and not fuses_adapters(self.model):
            base = section.path or str(section.preset)
            save_peft(folder / folder_lib.ADAPTER, trained, model, base=base, **options)
        params = union(trained, frozen)
        options["dtype"] = train.export_dtype
        if self.model.weights is not None:
            options["kernels"] = self._kernels()
        written = folder / folder_lib.MODEL
        save_hf(written, params, model, self.tokenizer, **options)
        if section.encoder_layers is None:
            announce(
                f"use it with LanguageModel.load({str(written)!r}), `python -m lcjax.serve --model"
                f" {written}`, or `path: {written}` in a method of an evaluation"
            )

    def _kernels(self) -> Callable | None:
        """Returns what reads the floats of stored kernels; None: they are dequantised."""
        section, name = self.config.model, self.model.weights.name
        if has_kernels(section.path):
            announce(f"adapters are merged into the weights of {section.path}, not into {name}")
            options = {"base": section.base, "param_dtype": section.param_dtype}
            return kernel_reader(section.path, mesh=self.mesh, **options)
        source = section.path or f"model.preset={section.preset}"
        announce(f"adapters are merged into dequantised {name}: {source} has no file of weights")
        return None

    def training_flops(self) -> float:
        return estimate.flops(self.config, self.model).training_flops

    def summary(self) -> list[str]:
        return self._memory or []


class HeadGateTask(LanguageModelTask):
    """Trains a gate for each key head; `<run>/model` has the file that `duo_attention` reads."""

    export_format = folder_lib.HEADS_FOLDER

    def load_model(self):
        params, train = super().load_model(), self.config.train
        self.model = train.head_gates.in_model(self.model)
        init, select = Decoder(self.model).init, lambda path: path.endswith(HEAD_GATE)
        return union(params, new_params(init, self.mesh, select, seed=train.seed))

    def _saved_model(self):
        return self.model.for_inference()

    def objective(self, split):
        """Returns the same loss for the training and the validation."""
        train = self.config.train
        penalty = train.head_gates.penalty
        return gate_distillation(self.model, train.positions, penalty, mesh=self.mesh)

    def export(self, folder, trained, frozen):
        """Writes the gates, a list for each layer that has some."""
        paths = flatten(jax.tree.map(distributed.gather, trained))
        table = np.concatenate([np.atleast_2d(clipped(paths[path])) for path in _in_order(paths)])
        written = folder / folder_lib.MODEL
        if distributed.is_main_process():
            written.mkdir(exist_ok=True)
            gates = self.config.train.head_gates
            scores = {"sinks": gates.sinks, "recent": gates.recent, "scores": table.tolist()}
            (written / folder_lib.HEADS).write_text(json.dumps(scores, indent=1))
        announce(
            f"use it with model.cache: {{type: duo_attention, file: {written / folder_lib.HEADS}}}"
        )


def _in_order(paths: Iterable[str]) -> list[str]:
    """Returns paths in the order of layers: `layers_2/...` before `layers_10/...`."""
    return sorted(paths, key=lambda path: (len(path), path))


def split_trained(config: TrainConfig, params: dict) -> tuple[dict, dict]:
    """Splits parameters into trained and frozen ones by the rules of `config.train`.

    Args:
      config: config of the run.
      params: all parameters, with adapters. It is emptied, so that no array is in memory twice, in
        two dtypes or places.

    Returns:
      The trained parameters in float32, and the frozen ones in their dtypes; both in the host's
      memory if `train.offload` is parameters.

    Raises:
      InputError: if a rule matches no parameter, or leaves new adapters untrained.
    """
    train = config.train
    trained, frozen = split(params, trainable(flatten(params), train.rules()))
    params.clear()
    trainable(flatten(trained), [rate.rule for rate in train.rates], "train.rates")
    paths = [path for path in flatten(frozen) if lora_lib.is_adapter(path)]
    if paths:
        raise InputError(
            f"train.trainable={list(train.trainable)} leaves adapters of train.lora untrained"
            f" ({paths[0]}); add the rule lora, or drop train.lora"
        )
    if train.offload == "parameters":
        trained = _map_leaves(trained, lambda path, leaf: to_host(path, leaf, jnp.float32))
        return trained, _map_leaves(frozen, to_host)
    return _map_leaves(trained, lambda _, leaf: to_float32(leaf)), frozen


def _map_leaves(tree: dict, change: Callable[[str, jax.Array], jax.Array]) -> dict:
    """Replaces one leaf after another and empties `tree`, so no two copies are in memory."""
    flat = flatten(tree)
    tree.clear()
    for path in list(flat):
        flat[path] = change(path, flat[path])
    return nest(flat)

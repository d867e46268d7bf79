"""Every option of every command, typed, once. Defaults stand here and nowhere else.

A recipe is one YAML file holding a `Recipe`; `extends: other.yaml` (relative to the file) inherits from another.
Precedence: command-line override (`train.optim.lr=1e-3`) > file > default. Each command reads the whole recipe
and uses its own section; paths left empty follow from `work` and `name`. Relative paths are relative to the current
directory, except that of `extends`.
"""

from kvshot_ds.config.base import Dtype, Layers, Section, Storage
from kvshot_ds.config.drafters import (
    AnyDrafterConfig,
    BlockConfig,
    DFlashConfig,
    DrafterConfig,
    GateConfig,
    HiddenOnlyConfig,
    HybridBlockConfig,
    HybridConfig,
    KVBlockConfig,
    KVOnlyConfig,
    KVSourceConfig,
)
from kvshot_ds.config.preparation import (
    CleaningConfig,
    EndpointConfig,
    PrepConfig,
    RegenerateConfig,
    Rule,
    SourceConfig,
    SynthesisConfig,
    TemplateConfig,
)
from kvshot_ds.config.recipe import Recipe, dump_recipe, load_recipe, merge, parse_override
from kvshot_ds.config.serving import BenchConfig, DecodeConfig, DraftingConfig, LatencyConfig, SamplingConfig, ServeConfig
from kvshot_ds.config.stages import CaptureConfig, EvalConfig, FeatureConfig, RayConfig, ReportConfig, StoreConfig, TargetConfig
from kvshot_ds.config.sweep import ALIASES, DiagnoseConfig, HalvingConfig, SweepConfig
from kvshot_ds.config.training import GroupConfig, InitConfig, ObjectiveConfig, OptimConfig, TrainConfig

__all__ = [
    "ALIASES",
    "AnyDrafterConfig",
    "BenchConfig",
    "BlockConfig",
    "CaptureConfig",
    "CleaningConfig",
    "DFlashConfig",
    "DecodeConfig",
    "DiagnoseConfig",
    "DrafterConfig",
    "DraftingConfig",
    "Dtype",
    "EndpointConfig",
    "EvalConfig",
    "FeatureConfig",
    "GateConfig",
    "GroupConfig",
    "HalvingConfig",
    "HiddenOnlyConfig",
    "HybridBlockConfig",
    "HybridConfig",
    "InitConfig",
    "KVBlockConfig",
    "KVOnlyConfig",
    "KVSourceConfig",
    "LatencyConfig",
    "Layers",
    "ObjectiveConfig",
    "OptimConfig",
    "PrepConfig",
    "RayConfig",
    "Recipe",
    "RegenerateConfig",
    "ReportConfig",
    "Rule",
    "SamplingConfig",
    "Section",
    "ServeConfig",
    "SourceConfig",
    "Storage",
    "StoreConfig",
    "SweepConfig",
    "SynthesisConfig",
    "TargetConfig",
    "TemplateConfig",
    "TrainConfig",
    "dump_recipe",
    "load_recipe",
    "merge",
    "parse_override",
]

"""Typed configuration: TOML or YAML files, every part by class path, checked before anything runs.

>>> config = load_config("run.toml", ["--trainer.max_epochs", "3"])
>>> parts = config.build()
>>> trainer = parts.make_trainer(hookline.Trainer)
"""

from hookline.config.hooks_config import HooksConfig
from hookline.config.load import Config, Parts, load_config
from hookline.config.problems import ConfigError
from hookline.config.schema import schema

__all__ = ["Config", "ConfigError", "HooksConfig", "Parts", "load_config", "schema"]

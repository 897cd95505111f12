"""Typed configuration: TOML or YAML files, every part by class path, checked before anything runs.

A class path can name only classes of the right kind from allowed packages. May import: util, engine,
loggers, distributed, data, run.
"""

from hookline.config.hooks import HooksConfig
from hookline.config.load import Config, Parts, load_config
from hookline.config.problems import ConfigError
from hookline.config.schema import schema

__all__ = ["Config", "ConfigError", "HooksConfig", "Parts", "load_config", "schema"]

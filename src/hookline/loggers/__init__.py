"""Where metrics go."""

from hookline.loggers.base import Logger, Loggers, make_loggers
from hookline.loggers.jsonl import JSONLines

__all__ = ["JSONLines", "Logger", "Loggers", "make_loggers"]

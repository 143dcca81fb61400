"""Integrations of training frameworks. Each checks its framework before it relies on it."""

"""Loragate: many tenants' LoRA adapters, one shared base model, one batch."""

__version__ = "0.1.0"

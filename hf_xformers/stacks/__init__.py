"""Slot `stack`: how layers form a network. The depth loop is a component."""

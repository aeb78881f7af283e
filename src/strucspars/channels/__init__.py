"""The graph of channels: what operations do to them, and which tensors must store them in one order."""

# Importing the rules registers them.
from strucspars.channels.graph import ChannelGraph, channel_graph, register_channel_rule
from strucspars.channels.rules import elementwise, unordered_positions
from strucspars.channels.sharing import NetworkChannels, OrderSharing, network_channels
from strucspars.channels.tracing import traced

__all__ = [
    "ChannelGraph",
    "NetworkChannels",
    "OrderSharing",
    "channel_graph",
    "elementwise",
    "network_channels",
    "register_channel_rule",
    "traced",
    "unordered_positions",
]

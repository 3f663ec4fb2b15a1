# SPDX-License-Identifier: Apache-2.0
"""What the inputs of a graph hold besides path lengths and edge types."""

# `spatial_pos`: no path between two nodes; a pair with the token that stands for the whole graph.
UNREACHABLE, GRAPH_TOKEN = -1, -2
# `edge_paths`: the path has ended.
NO_EDGE = -1

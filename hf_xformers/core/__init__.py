# SPDX-License-Identifier: Apache-2.0
"""What every component relies on and what knows no mechanism: specs, the call's context, caches, memories, outputs,
losses."""

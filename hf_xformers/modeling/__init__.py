# SPDX-License-Identifier: Apache-2.0
"""What stands on the trunk: language models, classifiers, sentence pairs and images."""

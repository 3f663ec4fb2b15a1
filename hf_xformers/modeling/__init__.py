"""What stands on the trunk: language models, classifiers, sentence pairs and images."""

"""The paper's CIFAR networks. Networks of torchvision and timm come from those libraries."""

"""Packaging of raysgd: what is shipped, and which packages each feature needs."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/raysgd/raysgd"
"""The one address from which all links come; `tests/docs/test_site.py` compares the others with it."""


def read_version() -> str:
    """Read the version without importing the package, whose dependencies may not be installed yet."""
    source = (ROOT / "raysgd" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError('`raysgd/_version.py` must contain a line like `__version__ = "0.1.0"`.')
    return found.group(1)


def read_description() -> str:
    """Return the README with absolute links: it is the project page. Empty where only the sources were copied."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{REPOSITORY}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/blob/main/", text)


def union(*groups: list[str]) -> list[str]:
    """Join lists of requirements, each requirement once, sorted."""
    return sorted({requirement for group in groups for requirement in group})


TORCH = ["torch>=2.6"]

EXTRAS = {
    "torch": TORCH,
    "tf": ["tensorflow>=2.16", "tf_keras>=2.16"],
    # Horovod itself is absent: its last release does not build against today's PyTorch as it is. These are what
    # building it (`python -m raysgd.horovod.install`, with a C++ compiler and make) and running it need; nothing
    # imports cffi, but Horovod asks for it.
    "horovod": union(
        TORCH,
        [
            "cffi>=1.4",
            "cmake>=3.13,<4",
            "cloudpickle>=2.2",
            "packaging>=21",
            "psutil>=5.9",
            "pyyaml>=6",
            "setuptools>=70.1",
        ],
    ),
    "tune": ["ray[tune]>=2.9"],
    "data": ["ray[data]>=2.9"],
    "lightning": union(TORCH, ["lightning>=2.1"]),
    "metrics": union(TORCH, ["torchmetrics>=1.4"]),
    "storage": ["pyarrow>=14", "fsspec>=2023.6"],
    "tensorboard": ["tensorboardX>=2.6"],
    "mlflow": ["mlflow-skinny>=2.9"],
    "wandb": ["wandb>=0.16"],
    "progress": ["tqdm>=4.60", "rich>=13"],
    "plot": ["matplotlib>=3.7"],
    "hf": union(TORCH, ["transformers>=4.48", "peft>=0.10", "safetensors>=0.4"]),
    "migrate": ["libcst>=1.1"],
}
# Every extra above in one environment.
EXTRAS["all"] = union(*EXTRAS.values())

# What the tests, the demo and the checks use.
EXTRAS["dev"] = union(
    *(
        EXTRAS[name]
        for name in (
            "torch",
            "horovod",
            "tune",
            "data",
            "lightning",
            "metrics",
            "storage",
            "tensorboard",
            "mlflow",
            "wandb",
            "progress",
            "plot",
            "hf",
            "migrate",
            "tf",
        )
    ),
    [
        "accelerate>=0.30",
        "boto3>=1.34",
        "codespell>=2.2",
        "GPy>=1.13",
        "ipykernel>=6",
        "moto[server]>=5",
        "mypy>=1.10",
        "nbclient>=0.8",
        "onnx>=1.15",
        "onnxscript>=0.1",
        "optuna>=4",
        "psutil>=5.9",
        "pytest>=9.0",
        "pytest-timeout>=2.2",
        "pytest-xdist>=3.5",
        "ruff>=0.6",
        "scikit-learn>=1.3",
        "setuptools>=77",
    ],
)
# What the benchmarks compare with.
EXTRAS["bench"] = union(EXTRAS["lightning"], ["accelerate>=0.30"])
EXTRAS["docs"] = ["latex2mathml>=3.77", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]

setup(
    name="raysgd",
    version=read_version(),
    description="Class-based, fault-tolerant training of PyTorch and TensorFlow models on Ray",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    author="The raysgd authors",
    url=REPOSITORY,
    project_urls={
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
        "Source": REPOSITORY,
    },
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["ray", "pytorch", "tensorflow", "distributed training", "elastic training", "fault tolerance"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    # The ready-made operators stand at the top of the repository, beside the examples, because they are code
    # to read and copy from. Users import them from within the package.
    package_dir={"raysgd.operators": "operators"},
    packages=[*find_packages(include=["raysgd", "raysgd.*"]), "raysgd.operators"],
    package_data={"raysgd": ["py.typed"]},
    entry_points={"console_scripts": ["raysgd = raysgd.cli:main"]},
    zip_safe=False,
    python_requires=">=3.10,<3.13",
    install_requires=["click>=8", "cloudpickle>=2.2", "numpy>=1.23", "ray>=2.9", "xxhash>=3.0"],
    extras_require=EXTRAS,
)

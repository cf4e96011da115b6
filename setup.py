"""Metadata of the package; pyproject.toml has the build system and the tools' settings."""

from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def said_by(name: str) -> dict[str, Any]:
    """What a file of bpipe's defines, read without importing the package."""
    names: dict[str, Any] = {}
    exec((HERE / "bpipe" / name).read_text(encoding="utf-8"), names)
    return names


def readme() -> str:
    path = HERE / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


NAMES = said_by("extras.py")
EXTRAS = NAMES["EXTRAS"]
EXAMPLES = [*EXTRAS["cli"], *EXTRAS["plot"], "scikit-learn>=1.4", "transformers>=5"]
DOCS = ["ipykernel>=6.29", "mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.30", "nbclient>=0.10"]
TEST = [
    *EXAMPLES,
    *DOCS,
    *EXTRAS["search"],
    "build>=1.2",
    "hypothesis>=6.100",
    "mypy>=1.15",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "pyyaml>=6",
    "ruff>=0.9",
    "scipy>=1.12",  # an exact search, which bounds what the balance pass moves
    "setuptools>=77",  # the build's own backend: tests build the package without network
    "wheel",
]

setup(
    name=NAMES["DISTRIBUTION"],
    version=said_by("_version.py")["__version__"],
    description="Pipeline parallelism for PyTorch with balanced activation memory: peer-to-peer offload of activations",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["bpipe", "bpipe.*"]),
    package_data={"bpipe": ["py.typed", "tools/page.html"]},
    entry_points={"console_scripts": ["bpipe = bpipe.tools.cli:main"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.11", "numpy"],  # docs/versions.md has the releases that were tried
    extras_require={**EXTRAS, "examples": EXAMPLES, "docs": [*EXTRAS["plot"], *DOCS], "test": TEST},
    keywords=[
        *("pytorch", "distributed training", "pipeline parallelism", "activation memory", "activation offloading", "p2p"),
        *("1F1B", "interleaved", "virtual stages", "zero bubble", "BPipe"),
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    zip_safe=False,
)

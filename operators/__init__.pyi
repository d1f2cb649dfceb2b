"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from raysgd.operators.gan import GANOperator as GANOperator
from raysgd.operators.hugging_face import HuggingFaceOperator as HuggingFaceOperator
from raysgd.operators.packing import collate_packs as collate_packs
from raysgd.operators.packing import pack as pack
from raysgd.operators.supervised import ClassificationOperator as ClassificationOperator
from raysgd.operators.supervised import RegressionOperator as RegressionOperator
from raysgd.operators.supervised import SegmentationOperator as SegmentationOperator

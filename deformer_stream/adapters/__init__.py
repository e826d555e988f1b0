"""Detectors with the interfaces of other libraries, each of which needs its library.

scikit_learn   `DeformerDetector`, for pipelines and searches of scikit-learn
pyod           `PyODDetector`, with the conventions of PyOD
river          `RiverDetector`, with the interface of River
"""

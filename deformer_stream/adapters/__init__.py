"""Detectors with the interfaces of other libraries: scikit-learn, PyOD and River. Each needs its library."""

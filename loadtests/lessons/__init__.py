"""Inference as the textbook tells it, measured here on the real engine: `./headwater lessons`.

lesson.py is the frame, book.py the order, engine.py the engine under measurement, page.py what a
reader sees; every other module is one lesson or what several lessons share.
"""

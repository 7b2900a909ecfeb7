"""Blocks that are trained alone, each as one step of denoising (DiffusionBlocks, BlockTrain), and denoising members."""

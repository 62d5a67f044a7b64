"""Our own diffusion transformer: MDLM, BD3-LM, SEDD and their autoregressive twin."""

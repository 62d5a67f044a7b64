"""Our own diffusion transformer: MDLM, BD3-LM, SEDD, GIDD and their autoregressive twin."""

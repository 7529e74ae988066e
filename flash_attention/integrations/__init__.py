"""Attention of other libraries' models by these kernels, in one line each.

    import flash_attention.integrations.transformers as lab
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=lab.register())

    import flash_attention.integrations.diffusers as lab
    model.set_attention_backend(lab.register())

Both need their library: pip install '.[transformers]' or '.[diffusers]'.
"""

NAME = "attention_lab"
"""Name of the kernels in both libraries. transformers downloads kernels for an unknown name with
"flash" in it."""

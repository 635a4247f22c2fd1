"""zeor inside the tools people already use; nothing here is imported by `import zeor`, and each file needs its package.

zeor.integrations.accelerate     Hugging Face Accelerate
zeor.integrations.transformers   transformers.Trainer and TRL's trainers
zeor.integrations.lightning      Lightning's Trainer and Fabric
"""

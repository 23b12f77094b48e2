"""torchtitan config functions, one module a recipe: `--module configs.<recipe> --config <name>`."""

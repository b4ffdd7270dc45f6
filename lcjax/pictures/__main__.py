"""Draws pictures: python -m lcjax.pictures mask | rope | positions | attention --out=picture.png"""

import sys

from lcjax.pictures.command import main

if __name__ == "__main__":
    sys.exit(main())

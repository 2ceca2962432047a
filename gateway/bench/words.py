"""Common English words: most are one token of any vocabulary when a space is before them."""

_TEXT = """
the of and to in is that for it as was with be by on not he this are or his from at which but have
an had they you were their one all we can her has there been if more when will would who so no out
up into than them only some could time these two may then do first any my now such like our over
man me even most made after also did many before must through back years where much your way well
down should because each just those people how too little state good very make world still own see
men work long here get both between life being under never day same another know while last might
us great old year off come since against go came right used take three states himself few house
use during without again place around however home small found thought went say part once general
high upon school every
"""

WORDS = tuple(_TEXT.split())

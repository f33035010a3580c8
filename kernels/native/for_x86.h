/* The computation for processors of x86 with an instruction set that not all of them have: a file
   that includes this one says which (TARGET, as compilers call it), beside what attention_body.h
   asks for, and which body it is (BODY), if not that one.

   All of the body is compiled for it, not only the function that is called: GCC takes vectors
   apart that are wider than a function's registers before it inlines the function. */

/* Before the body includes them: what they define belongs to no instruction set. */
#include "attention.h"

#include <float.h>
#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#ifndef BODY
#define BODY "attention_body.h"
#endif

/* A pragma in which macros are expanded. */
#define PRAGMA(text) PRAGMA_OF(text)
#define PRAGMA_OF(text) _Pragma(#text)

#if defined(__clang__)
PRAGMA(clang attribute push(__attribute__((target(TARGET))), apply_to = function))
#else
PRAGMA(GCC push_options)
PRAGMA(GCC target(TARGET))
#endif

#include BODY

#if defined(__clang__)
PRAGMA(clang attribute pop)
#else
PRAGMA(GCC pop_options)
#endif
#endif

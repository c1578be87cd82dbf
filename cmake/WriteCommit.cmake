# cmake -Dsource=<checkout> -Dname=<variable> -Dfile=<file.cpp> -P WriteCommit.cmake
# Writes a source that defines `extern const char <name>[]`: the commit of the checkout, "-dirty" after it where files
# differ from it, "unknown" where it is no checkout.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND git describe --always --dirty --abbrev=12 --exclude=* WORKING_DIRECTORY ${source}
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE code)
if(NOT code EQUAL 0)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${file} CONTENT "extern const char @name@[];\nconst char @name@[] = \"@commit@\";\n" @ONLY)

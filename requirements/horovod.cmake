# Lets Horovod 0.28.1's unmodified source build against a torch of today. Passed as CMAKE_TOOLCHAIN_FILE.
# A toolchain file alone is read too early to change a compiler's flags, so it has itself read again after each project().
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")
# The bundled Gloo asks for a CMake older than CMake 4 accepts.
set(CMAKE_POLICY_VERSION_MINIMUM 3.5)
# The source asks for C++14, torch's headers for C++17 or later: this is what "C++14" is spelled as.
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")

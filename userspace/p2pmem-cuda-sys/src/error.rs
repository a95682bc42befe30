// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors of CUDA.

use std::error::Error;
use std::ffi::c_int;
use std::fmt;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    pub(crate) call: &'static str,
    /// `CUresult`.
    pub(crate) code: c_int,
    /// CUDA's description of the code.
    pub(crate) text: String,
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}() failed: {} (CUDA error {})", self.call, self.text, self.code)
    }
}

impl Error for CudaError {}

/// CUDA cannot be used.
#[derive(Debug)]
pub enum LoadError {
    /// libcuda.so.1 cannot be loaded.
    NotInstalled(libloading::Error),
    /// libcuda.so.1 does not have a function.
    TooOld(libloading::Error),
    /// `cuInit()` failed.
    Init(CudaError),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInstalled(error) => write!(f, "CUDA is not installed: {error}; install NVIDIA's driver"),
            Self::TooOld(error) => write!(f, "{error}; update NVIDIA's driver to 515 (CUDA 11.7) or later"),
            Self::Init(error) => error.fmt(f),
        }
    }
}

impl Error for LoadError {}

//! The compiled copy kernel; `scripts/build_kernels.py` makes it from `kernels/copy.cu`.

/// Machine code for several architectures, and PTX for the rest.
pub(crate) static FATBIN: &[u8] = include_bytes!("../kernels/copy.fatbin");

/// Name of the kernel.
pub(crate) const NAME: &std::ffi::CStr = c"kvlane_copy";

/// Threads of a block; the kernel is compiled for no more.
pub(crate) const THREADS: u32 = 512;

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_128;

    fn digest(bytes: &[u8]) -> String {
        format!("{:032x}", xxh3_128(bytes))
    }

    #[test]
    fn the_kernel_was_compiled_from_this_source() {
        let made_from: serde_json::Value =
            serde_json::from_str(include_str!("../kernels/copy.fatbin.json")).unwrap();
        let source = include_bytes!("../kernels/copy.cu");
        let advice = "run scripts/build_kernels.py";
        assert_eq!(made_from["source_xxh3_128"], digest(source), "{advice}");
        assert_eq!(made_from["fatbin_xxh3_128"], digest(super::FATBIN), "{advice}");
    }

    #[test]
    fn the_kernel_expects_the_table_and_the_block_that_we_give_it() {
        let source = include_str!("../kernels/copy.cu");
        assert!(source.contains(&format!("kThreads = {};", super::THREADS)));
        assert!(source.contains(&format!("{}(", super::NAME.to_str().unwrap())));
        assert_eq!(size_of::<crate::driver::TableEntry>(), 24);
        assert!(source.contains("static_assert(sizeof(Entry) == 24"));
    }
}

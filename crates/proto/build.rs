//! Compiles the wire messages without protoc.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["proto/kvlane.proto", "proto/cluster.proto"], ["proto"])?;
    // The largest answer by far, and a rare one: boxed, so that the others are small.
    let boxed = ".kvlane.v1.Reply.body.status";
    prost_build::Config::new().bytes(["."]).boxed(boxed).compile_fds(descriptors)?;
    Ok(())
}
